"""Which cached page goes first: least recently used, leaves before their parents. Pure order-keeping.

The index tells it which pages may go (`release`) and which may not (`acquire`). All calls are
O(log n) amortised: stale heap entries are skipped, and swept when they outnumber the live ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EvictionOrder:
    """Evictable pages by last use. A page is a leaf when no page in the index is chained after it."""

    __slots__ = ("_clock", "_heap", "_stamp")

    def __init__(self) -> None:
        self._clock = 0
        self._stamp: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._stamp)

    def __contains__(self, page: int) -> bool:
        return page in self._stamp

    def release(self, page: int, *, leaf: bool) -> None:
        """The page's last user went away just now: it may be evicted."""
        self._clock += 1
        self._stamp[page] = self._clock
        if leaf:
            self.became_leaf(page)

    def acquire(self, page: int) -> None:
        """The page is in use, or gone from the index: it may not be evicted."""
        self._stamp.pop(page, None)

    def became_leaf(self, page: int) -> None:
        """The last page chained after it went away. It keeps its time of last use."""
        if page not in self._stamp:
            return
        heapq.heappush(self._heap, (self._stamp[page], page))
        if len(self._heap) > 2 * len(self._stamp) + 64:
            self._heap = [entry for entry in set(self._heap) if self._stamp.get(entry[1]) == entry[0]]
            heapq.heapify(self._heap)

    def oldest_leaf(self, is_leaf: Callable[[int], bool]) -> int | None:
        """The least recently used evictable leaf; None when no evictable page is a leaf."""
        while self._heap:
            stamp, page = self._heap[0]
            if self._stamp.get(page) == stamp and is_leaf(page):
                return page
            heapq.heappop(self._heap)
        return None

    def oldest(self) -> int | None:
        """The least recently used evictable page, leaf or not."""
        return next(iter(self._stamp), None)
