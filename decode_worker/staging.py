"""Memory for pages of another layout between their arrival and the re-laying of their rows.

What lives here: slots of a page's size, kept for the next page, within a limit, and the reads that wait for
one. What does not: who reads into them (`decode_worker.reads`), the copies (`kvtransfer.relay`).

    slot    the reader's from `take` on, written by it alone; once read ours: verified, re-laid, given back
"""

from __future__ import annotations

import mmap
from collections import deque

from kvtransfer.effects import StartRead

LIMIT_BYTES = 32 << 20
"""Of pages in flight from one peer; a read beyond it waits for a slot, whatever was granted. By peer, so that
a slow one keeps nobody else waiting."""


class Staging:
    """Slots for one peer's pages, and its reads that wait for one. Control thread only. forgotten: the peer
    is gone."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.forgotten = False
        self.waiting: deque[StartRead] = deque()
        self._limit = limit_bytes
        self._free: dict[int, list[memoryview]] = {}
        self._spare_bytes = self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are taken."""
        return self._used_bytes

    @property
    def busy(self) -> bool:
        """Whether a read uses it or waits for it."""
        return bool(self._used_bytes or self.waiting)

    def take(self, size_bytes: int) -> memoryview | None:
        """A slot of that size, writable; None if it would go over the limit. One slot is always to be had."""
        if self._used_bytes and self._used_bytes + size_bytes > self._limit:
            return None
        self._used_bytes += size_bytes
        if free := self._free.get(size_bytes):
            self._spare_bytes -= size_bytes
            return free.pop()
        if self._used_bytes + self._spare_bytes > self._limit:  # slots of other sizes that nobody uses
            self._free.clear()
            self._spare_bytes = 0
        return memoryview(mmap.mmap(-1, size_bytes))

    def give(self, slot: memoryview) -> None:
        """Takes a slot back that nobody touches any more."""
        self._used_bytes -= slot.nbytes
        self._spare_bytes += slot.nbytes
        self._free.setdefault(slot.nbytes, []).append(slot)
