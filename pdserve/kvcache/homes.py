"""Which part of a pool a page lies in, where its parts belong to ranks of a worker. Pure; a leaf.

What lives here: the map from page ids to homes. What does not: choosing a home (`manager`), memory (`pool`).

    page id   0 … n - 1      n … 2n - 1     …
    home      rank 0         rank 1               n = pages_each; a sequence's pages all have one home

A pool that is not divided has one home, and every page has that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """num_homes equal parts of pages_each pages, one after the other. Raises ValueError for an empty one."""

    num_homes: int
    pages_each: int

    def __post_init__(self) -> None:
        if self.num_homes < 1 or self.pages_each < 1:
            raise ValueError("num_pages must be at least 1 for each home")

    @classmethod
    def over(cls, num_pages: int, num_homes: int = 1) -> Homes:
        """Of a pool of so many pages. Raises ValueError where they do not divide."""
        if num_pages % num_homes:
            raise ValueError("a pool's pages must divide evenly over its homes")
        return cls(num_homes=num_homes, pages_each=num_pages // num_homes)

    @property
    def num_pages(self) -> int:
        """Of all homes."""
        return self.num_homes * self.pages_each

    def home(self, page: int) -> int:
        """Where a page lies."""
        return page // self.pages_each

    def pages(self, home: int) -> range:
        """All pages of a home."""
        return range(home * self.pages_each, (home + 1) * self.pages_each)
