"""Where rows of a prefill worker's pages lie in ours, which may be of another size. Pure.

What lives here: a prompt's pages counted in both sizes, which of ours a page of theirs goes to, and what is
known when some of theirs are verified. What does not: reserving pages (`decode_worker.reserve`), what layouts
are (`kvtransfer.plan`).

    theirs (32 rows)   |        0        |        1        |  tail  |
    ours   (16 rows)   |   0    |   1    |   2    |   3    |   4    |
                         hit      lacking  lacking  lacking  lacking

    Theirs 0 is pulled whole, and its rows of ours 1 alone are copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtransfer.effects import Relay
from kvtransfer.plan import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A prompt in their pages and ours. rows: of the prompt. page_size: ours. hit_pages: of ours, from the
    first on, that the prefix cache had. verified: further ones of ours that are there."""

    origin: Origin
    rows: int
    page_size: int
    hit_pages: int = 0
    verified: frozenset[int] = frozenset()

    @property
    def num_source_pages(self) -> int:
        """Their pages of the prompt."""
        return -(-self.rows // self.origin.page_size)

    @property
    def source_hits(self) -> int:
        """Their pages, from the first on, whose rows are all hits of ours."""
        return self.hit_pages * self.page_size // self.origin.page_size

    @property
    def source_verified(self) -> frozenset[int]:
        """Their further pages of which we have all rows."""
        if not self.verified:
            return frozenset()
        pages = range(self.source_hits, self.num_source_pages)
        return frozenset(index for index in pages if not self.lacking(index))

    def has(self, page: int) -> bool:
        """Whether our page is there: a hit, or verified before."""
        return page < self.hit_pages or page in self.verified

    def lacking(self, index: int) -> tuple[int, ...]:
        """Our pages that their page `index` has rows of and that are not there yet."""
        first = index * self.origin.page_size
        end = min(first + self.origin.page_size, self.rows)
        pages = range(first // self.page_size, -(-end // self.page_size))
        return tuple(page for page in pages if not self.has(page))

    def sources(self, page: int) -> range:
        """Their pages that have rows of our page."""
        first = page * self.page_size
        end = min(first + self.page_size, self.rows)
        return range(first // self.origin.page_size, -(-end // self.origin.page_size))

    def covers(self, page: int) -> bool:
        """Whether their pages have something for every row of ours, beyond the prompt's end too."""
        return (page + 1) * self.page_size <= self.num_source_pages * self.origin.page_size

    def known_pages(self, verified: int) -> int:
        """Our pages, from the first on, that are there when their first `verified` pages are."""
        rows, count = min(verified * self.origin.page_size, self.rows), self.hit_pages
        while self.has(count) or (count * self.page_size < rows and self._end(count) <= rows):
            count += 1
        return count

    def _end(self, page: int) -> int:
        return min((page + 1) * self.page_size, self.rows)

    def relay(self, index: int, pages: tuple[int, ...]) -> Relay | None:
        """What becomes of their page `index`; None: it is ours as it is. pages: our block table."""
        if not self.origin.layout:
            return None
        span = math.lcm(self.origin.page_size, self.page_size)
        number, ours = index * self.origin.page_size // span, span // self.page_size
        base = number * ours
        last = min(base + ours, -(-self.rows // self.page_size))
        return Relay(
            layout=self.origin.layout,
            span_page=index - number * (span // self.origin.page_size),
            num_tokens=min(span, self.rows - number * span),
            targets=tuple((page - base, pages[page]) for page in self.lacking(index)),
            held=frozenset(page - base for page in range(base, last) if self.has(page)),
        )
