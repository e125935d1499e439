"""Memory through which experts' weights get from one rank to another, and the thread that copies them.

What lives here: lanes, each with room for one expert, and copying in slices beside the steps. What does not:
which expert goes where (`pdserve.ranks.rebalancing`), blocks (`pdserve.models.expert_bank`).

    block of the source rank ──(source's thread)──▶ lane ──(target's thread)──▶ spare block of the target rank
    a lane belongs to one copy from its order to its last word; the leader hands lanes out

A slice is copied without the interpreter's lock, then the thread waits: a step beside it loses a little
memory bandwidth and nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SLICE_BYTES = 128 << 10
WAIT_S = 0.001
"""Between two slices: with these, about 100 MB a second and less than a tenth of a core."""
Piece = tuple[int, int]
"""(address, bytes)."""


def make_ferry(num_bytes: int) -> int:
    """Descriptor of new memory without a name."""
    fd = os.memfd_create("pdserve-experts", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


class Ferry:
    """The lanes as this process has them mapped. The mapping goes with this object."""

    def __init__(self, fd: int, lane_bytes: int) -> None:
        """fd: may be closed afterwards."""
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lane_bytes = lane_bytes

    def lane(self, number: int) -> int:
        """Its address."""
        return self._start + number * self._lane_bytes


@dataclass(slots=True, kw_only=True)
class Job:
    """One way over the ferry. pieces: of a block. out: from the block to the lane, or back. keep: what must
    live as long. done: called on the thread with the checksum of what was copied, None if it was given up.
    """

    pieces: Sequence[Piece]
    lane: int
    out: bool
    keep: object
    done: Callable[[int | None], None]
    given_up: threading.Event = field(default_factory=threading.Event)


class Ferryman:
    """The thread; it starts with the first job."""

    def __init__(self, slice_bytes: int = SLICE_BYTES, wait_s: float = WAIT_S) -> None:
        self._slice_bytes, self._wait_s = slice_bytes, wait_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, job: Job) -> None:
        """Jobs are done one after the other."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Gives up what is left and waits for the thread."""
        self._closed.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.done(self._copy(job))

    def _copy(self, job: Job) -> int | None:
        """The checksum is of the target's bytes: what was written, not what should have been. It is there for
        accidents, so the cheapest that finds them will do; the canary comes after it."""
        checksum, lane = 0, job.lane
        for start, length in job.pieces:
            for at in range(0, length, self._slice_bytes):
                count = min(self._slice_bytes, length - at)
                block, here = start + at, lane + at
                target, source = (here, block) if job.out else (block, here)
                ctypes.memmove(target, source, count)
                checksum = zlib.crc32((ctypes.c_char * count).from_address(block), checksum)
                if job.given_up.wait(self._wait_s) or self._closed.is_set():
                    return None
            lane += length
        return checksum
