"""Since when pages are in the use they are in, so that stranded memory has a name. Pure."""

from __future__ import annotations

from bisect import bisect_right

from pdserve.types import AGE_LIMITS_S, PageAges, UsedState


class PageAgeBook:
    """The present use of every page of a pool. now: set by the allocator; seconds."""

    def __init__(self, num_pages: int) -> None:
        self.now = 0.0
        self._use: list[UsedState | None] = [None] * num_pages
        self._since: dict[UsedState, dict[int, float]] = {use: {} for use in UsedState}

    def use(self, page: int) -> UsedState | None:
        """The noted use; None for a page that is free or evictable."""
        return self._use[page]

    def note(self, page: int, use: UsedState | None) -> None:
        """The page is in this use; its age starts anew if it was in another."""
        old = self._use[page]
        if old is use:
            return
        if old is not None:
            del self._since[old][page]
        if use is not None:
            self._since[use][page] = self.now
        self._use[page] = use

    def counts(self, now: float) -> tuple[PageAges, ...]:
        """Pages by use and age."""
        return tuple(PageAges(state=use, counts=_by_age(since, now)) for use, since in self._since.items())


def _by_age(since: dict[int, float], now: float) -> tuple[int, ...]:
    counts = [0] * (len(AGE_LIMITS_S) + 1)
    for begin in since.values():
        counts[bisect_right(AGE_LIMITS_S, now - begin)] += 1
    return tuple(counts)
