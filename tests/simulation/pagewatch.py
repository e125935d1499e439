"""S3 at every step, without reading the whole pool at every step.

Page states and holders change through three methods of the allocator; the pages they touched are checked
after every input, with the counts. The whole pool is proven (`check_integrity`) every so many inputs and
at every heartbeat, so that nothing that escapes the first check lives for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.kvcache.allocator import CACHE, PageState
from pdserve.kvcache.manager import PageManager

FULL_EVERY = 24


class PageWatch:
    """Watches one pool."""

    def __init__(self, pages: PageManager) -> None:
        self._pages = pages
        self._touched: set[int] = set()
        self._inputs = 0
        allocator: Any = pages.allocator
        for name in ("_move", "_add", "_forget"):
            setattr(allocator, name, self._noting(getattr(allocator, name)))

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        def noting(page: int, about: Any) -> None:
            self._touched.add(page)
            original(page, about)

        return noting

    def problem(self) -> str:
        """What is wrong after an input; "" if nothing that can be seen cheaply, or at all every so often."""
        if not self._touched:
            return ""
        touched, self._touched = self._touched, set()
        self._inputs += 1
        if self._inputs % FULL_EVERY == 0:
            return self._pages.check_integrity()
        for page in touched:
            if wrong := self._page_problem(page):
                return f"page {page}: {wrong}"
        allocator = self._pages.allocator
        counts = allocator.counts()
        if sum(counts.values()) != allocator.num_pages or counts[PageState.FREE] != allocator.num_free:
            return "the states do not add up"
        return ""

    def _page_problem(self, page: int) -> str:
        pages, allocator = self._pages, self._pages.allocator
        if wrong := allocator._page_problem(page):
            return wrong
        if (page in pages.index_of(page)) != (CACHE in allocator._holders[page]):
            return "published if and only if the cache holds it"
        if pages.index_of(page).evictable(page) != allocator.evictable(page):
            return "evictable if and only if sealed and the cache alone holds it"
        return ""
