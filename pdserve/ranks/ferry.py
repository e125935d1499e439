"""Memory through which experts' weights get from one rank to another, and the thread that copies them.

What lives here: lanes, each with room for one expert, and copying in slices beside the steps. What does not:
which expert goes where (`pdserve.ranks.rebalancing`), blocks (`pdserve.models.expert_bank`).

    block of the source rank ──(source's thread)──▶ lane ──(target's thread)──▶ spare block of the target rank
    a lane belongs to one copy from its order to its last word; the leader hands lanes out

A way is one call of csrc/ferry.cpp, which copies and sums slices and waits between them: a step beside it
loses a little memory bandwidth and never waits for the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.kernels.build import built

SLICE_BYTES = 128 << 10
"""A multiple of 64."""
WAIT_S = 0.001
"""Between two slices: with these, about 100 MB a second and less than a tenth of a core."""
_SOURCES = Path(__file__).with_name("csrc")
Piece = tuple[int, int]
"""(address, bytes)."""


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises ConfigError where it can not be built."""
    loaded = ctypes.CDLL(str(built(_SOURCES, "ferry")))
    at, size = ctypes.c_void_p, ctypes.c_int64
    loaded.pdf_carry.argtypes = (at, size, at, ctypes.c_int, size, size, at, at, at)
    return loaded


class Flag:
    """Set once, by any thread; csrc/ferry.cpp looks at it."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)

    def set(self) -> None:
        """For good."""
        self._value.value = 1

    @property
    def address(self) -> int:
        """Of 4 bytes, not 0 once it is set."""
        return ctypes.addressof(self._value)


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
    given_up: Flag = field(default_factory=Flag)


class Ferryman:
    """The thread; it starts with the first job."""

    def __init__(self, slice_bytes: int = SLICE_BYTES, wait_s: float = WAIT_S) -> None:
        """slice_bytes: a multiple of 64. Raises ConfigError where csrc/ferry.cpp can not be built."""
        assert slice_bytes % 64 == 0
        self._carry = _library().pdf_carry  # now: to load it takes longer than a step
        self._slice_bytes, self._wait_ns = slice_bytes, round(1e9 * wait_s)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = Flag()

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
        pieces = (ctypes.c_int64 * (2 * len(job.pieces)))(*(n for piece in job.pieces for n in piece))
        checksum = ctypes.c_uint64(0)
        whole = self._carry(
            pieces, len(job.pieces), job.lane, job.out, self._slice_bytes, self._wait_ns,
            job.given_up.address, self._closed.address, ctypes.addressof(checksum),
        )  # fmt: skip
        return checksum.value if whole else None
