"""A `Group` of ranks of one machine over shared memory: a copy in, a copy out, usually no system call.

What lives here: the segment and the calls into csrc/exchange.cpp. What does not: who makes the segment, and
how its descriptor gets to the ranks (`pdserve.ranks`).

Why beside gloo: a decode step has dozens of collectives of a few KiB, and over sockets each of them wakes
three threads per rank. Sums go in order of rank for every element, so that a row's result does not depend on
its place in the step, which a ring's does.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pdserve.errors import WorkerLost
from pdserve.kernels.build import built
from pdserve.parallel.group import LATE, TIMEOUT_S, Traffic, received, row_bytes, sent_away

SLOT_BYTES = 1 << 20
"""A tensor moves in pieces of this size: one fits the second cache."""
_FLAG_BYTES, _PAGE = 64, 4096
_KINDS = {torch.float32: 0, torch.int32: 1, torch.uint8: 2}
_SOURCES = Path(__file__).with_name("csrc")
_P, _I, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises ConfigError where it can not be built."""
    loaded = ctypes.CDLL(str(built(_SOURCES, "exchange")))
    head = (_P, _I, _I, _I, _P)
    loaded.pdx_add.argtypes = (*head, _P, _I, _N, ctypes.c_double)
    loaded.pdx_gather.argtypes = (*head, _P, _P, _I, ctypes.c_double)
    loaded.pdx_all_to_all.argtypes = (*head, _P, _P, _P, ctypes.c_double)
    loaded.pdx_abort.argtypes = (_P, _I)
    loaded.pdx_abort.restype = None
    return loaded


def segment_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Length of the segment of so many ranks."""
    return -(-size * _FLAG_BYTES // _PAGE) * _PAGE + 2 * size * slot_bytes


def make_segment(size: int) -> int:
    """Descriptor of a new segment, without a name, for `size` ranks."""
    fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, segment_bytes(size))
    return fd


class ShmGroup:
    """See the module and `Group`. All ranks map the same segment, zeroed before the first call."""

    kind = "shm"

    def __init__(
        self, fd: int, *, rank: int, size: int, timeout_s: float = TIMEOUT_S, slot_bytes: int = SLOT_BYTES
    ) -> None:
        """fd: of the segment; may be closed afterwards. slot_bytes: equal on all ranks, a multiple of 64."""
        self.rank, self.size = rank, size
        self.traffic = Traffic()
        self._timeout_s = timeout_s
        self._map = mmap.mmap(fd, segment_bytes(size, slot_bytes))
        self._turn = ctypes.c_uint32(0)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._head = (start, rank, size, slot_bytes, ctypes.addressof(self._turn))
        self._add, self._gather = _library().pdx_add, _library().pdx_gather
        self._all_to_all = _library().pdx_all_to_all
        self._broken = False

    def add(self, x: torch.Tensor) -> None:
        """See Group. x: float32, int32 or uint8."""
        self._run(x, x.nbytes, self._add, x.data_ptr(), x.numel(), _KINDS[x.dtype])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group."""
        out = x.new_empty(self.size, *x.shape)
        self._run(x, x.nbytes, self._gather, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """See Group. Others than rank 0 do not wait for it."""
        out = x.new_empty(self.size, *x.shape) if self.rank == 0 else None
        self._run(x, x.nbytes, self._gather, x.data_ptr(), None if out is None else out.data_ptr(), x.nbytes)
        return out

    def all_to_all(self, x: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """See Group."""
        out = received(x, counts, self.rank)
        row = row_bytes(x)
        sizes = torch.tensor(counts, dtype=torch.int64) * row
        away = sent_away(counts, self.rank) * row
        self._run(x, away, self._all_to_all, x.data_ptr(), out.data_ptr(), sizes.data_ptr())
        return out

    def abort(self) -> None:
        """Calls of all ranks that wait, and all to come that would, raise WorkerLost. Any thread."""
        _library().pdx_abort(*self._head[:1], self.size)

    def close(self) -> None:
        """No more calls. The mapping goes with this object."""
        self._broken = True

    def _run(self, x: torch.Tensor, num_bytes: int, call: Any, *arguments: Any) -> None:
        assert x.is_contiguous()
        if self._broken:
            raise WorkerLost(LATE)
        began = time.perf_counter()
        if call(*self._head, *arguments, self._timeout_s):
            self._broken = True
            raise WorkerLost(LATE)
        self.traffic.num_calls += 1
        self.traffic.num_bytes += num_bytes
        self.traffic.seconds += time.perf_counter() - began
