"""The one manager of a worker's KV pages: allocator and prefix index behind one set of rules. Pure.

Only the control thread calls it. Rows and bytes are not its business: the scheduler and the transfer
sessions decide who holds what, and whoever drives the pool copies `changed_generations()` into the mapped
header after every batch of calls, before any byte of a page is written.

Where ranks of a worker have sequences of their own, the pool has several *homes*, one per rank: all pages of
a request lie in one, and each has a prefix index of its own, for a hit counts only where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.kvcache.allocator import CACHE, Holder, HolderKind, PageAllocator, PageState
from pdserve.kvcache.prefix import PrefixIndex
from pdserve.types import PageAges, PageName


class PageManager:
    """Pages of one pool. available = free + evictable; the pool is idle when that is all of it."""

    def __init__(self, num_pages: int, pool_id: int, num_homes: int = 1) -> None:
        """Raises ValueError unless the pages divide over the homes, at least one for each."""
        self.allocator = PageAllocator(num_pages, pool_id, num_homes)
        self.homes = self.allocator.homes
        self._indexes = tuple(PrefixIndex() for _ in range(num_homes))
        self.num_evicted = 0
        """Pages that the prefix cache gave up for new ones."""

    # ---- counts --------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_usable(self) -> int:
        """What an otherwise empty pool could give to one request: pages outside quarantine, of one home."""
        return self.homes.pages_each - min(map(self.allocator.quarantined_at, self._every_home))

    @property
    def num_quarantined(self) -> int:
        return self.allocator.count(PageState.QUARANTINED)

    @property
    def num_pins(self) -> int:
        """I/O pins on pages: reads into them and sends from them that have not ended."""
        return self.allocator.num_pins

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_evictable(self) -> int:
        """Sealed pages that nobody but the prefix cache holds."""
        return sum(index.num_evictable for index in self._indexes)

    @property
    def available(self) -> int:
        """Pages that `reserve` can hand out, over all homes."""
        return self.allocator.num_free + self.num_evictable

    def available_at(self, home: int) -> int:
        """Those of one home."""
        return self.allocator.free_at(home) + self._indexes[home].num_evictable

    @property
    def idle(self) -> bool:
        """Nobody but the cache holds anything (protocol.md §2)."""
        return self.available == self.num_pages

    def counts(self) -> dict[PageState, int]:
        """Pages by state; the values add up to num_pages."""
        return self.allocator.counts()

    def touch_time(self, now: float) -> None:
        """What happens from here on happens at `now`; whoever drives calls it before each input."""
        self.allocator.touch_time(now)

    def ages(self, now: float) -> tuple[PageAges, ...]:
        """Pages that are neither free nor evictable, by use and age."""
        return self.allocator.ages(now)

    def state(self, page: int) -> PageState:
        return self.allocator.state(page)

    def holders(self, page: int) -> frozenset[Holder]:
        return self.allocator.holders(page)

    def generation(self, page: int) -> int:
        return self.allocator.generation(page)

    def name(self, page: int) -> PageName:
        return self.allocator.name(page)

    def pages_of(self, holder: Holder) -> tuple[int, ...]:
        """Pages of one holder, in the order in which it came to hold them."""
        return self.allocator.pages_of(holder)

    def index_of(self, page: int) -> PrefixIndex:
        """The prefix index of the page's home; to look at."""
        return self._indexes[self.homes.home(page)]

    def changed_generations(self) -> list[tuple[int, int]]:
        """Drains (page, generation) of pages freed since the last call, for the mapped header."""
        return self.allocator.changed_generations()

    # ---- taking and giving back ----------------------------------------------------------------------

    def choose(
        self, keys: Sequence[bytes], total: int, keep_back: Sequence[int], only: int | None = None
    ) -> int | None:
        """The home for a request that takes `total` pages and whose leading ones have these keys.

        Of the homes (or the only one asked for) that have room for what its hits there leave missing, and
        for keep_back (by home) more: the one with the longest hit, then with the most room. None where it
        fits nowhere; else `match_and_hold` and `reserve` succeed there. Changes nothing.
        """
        best: tuple[int, int, int] | None = None
        for home in self._every_home if only is None else (only,):
            index = self._indexes[home]
            hits = index.match(keys)
            room = self.available_at(home) - sum(map(index.evictable, hits))
            if room >= total - len(hits) + keep_back[home]:
                best = max(best or (-1, 0, 0), (len(hits), room, -home))
        return None if best is None else -best[2]

    def reserve(
        self, n: int, holder: Holder, *, keep_back: int = 0, home: int | None = None
    ) -> tuple[int, ...] | None:
        """n reserved pages, evicting the least recently used cached ones as needed. None, and no change,
        when fewer than n + keep_back pages are available there. home: None for where the holder's pages are,
        or the roomiest. Raises InternalError for a request with pages in another home."""
        at = self._home_for(holder) if home is None else home
        if self.available_at(at) < n + keep_back:
            return None
        while self.allocator.free_at(at) < n:
            victims = self._indexes[at].pop_victims()
            self.num_evicted += len(victims)
            self._uncache(victims)
        return self.allocator.take(n, holder, at)

    def match(self, keys: Sequence[bytes], home: int | None = None) -> tuple[int, ...]:
        """Pages of the longest cached prefix of `keys`, in this home or in the one with the longest; holds
        nothing."""
        found = self._indexes if home is None else self._indexes[home : home + 1]
        return max((index.match(keys) for index in found), key=len)

    def match_and_hold(
        self, keys: Sequence[bytes], holder: Holder, home: int | None = None
    ) -> tuple[int, ...]:
        """Pages of the longest cached prefix of `keys`, now held by `holder` too. home: None for where the
        holder's pages are, or the longest prefix."""
        pages = self.match(keys, self.allocator.home_of(holder) if home is None else home)
        for page in pages:
            self.hold(page, holder)
        return pages

    def hold(self, page: int, holder: Holder) -> None:
        """Adds a holder; again: no effect. Raises InternalError for a free or retiring page."""
        if holder.kind is HolderKind.CACHE:
            raise ValueError("the cache's holder comes with publish")
        self.allocator.hold(page, holder)
        self.index_of(page).acquire(page)

    def drop(self, page: int, holder: Holder) -> None:
        """Removes a holder; again: no effect. The last one frees the page."""
        if holder.kind is HolderKind.CACHE:
            raise ValueError("the cache's holder goes with unpublish or eviction")
        self.allocator.drop(page, holder)
        index = self.index_of(page)
        if not index.evictable(page) and self.allocator.evictable(page):
            index.release(page)

    def drop_all(self, holder: Holder) -> tuple[int, ...]:
        """Drops a holder everywhere; returns the pages it held. I/O pins have ids of their own and stay."""
        pages = self.allocator.pages_of(holder)
        for page in reversed(pages):
            self.drop(page, holder)
        return pages

    # ---- states --------------------------------------------------------------------------------------

    def fill(self, page: int) -> None:
        """reserved → filling: rows are about to be written."""
        self.allocator.fill(page)

    def seal(self, page: int, valid_rows: int) -> None:
        """filling → sealed: full, or a tail with `valid_rows` rows; immutable from now on."""
        self.allocator.seal(page, valid_rows)

    def quarantine(self, page: int) -> None:
        """Takes a held page out of use for good; it and its successors leave the cache."""
        self.unpublish_chain(page)
        self.allocator.quarantine(page)

    # ---- prefix cache --------------------------------------------------------------------------------

    def publish(self, page: int, key: bytes, parent_key: bytes | None) -> bool:
        """Offers a full sealed page to the prefix cache, chained after `parent_key` (None: first page).

        False, and no change, when the key is there already in the page's home, its parent is not, or the page
        is not sealed (quarantined meanwhile): the caller keeps a private page.
        """
        index = self.index_of(page)
        if self.allocator.state(page) is not PageState.SEALED or page in index:
            return False
        if not index.publish(key, parent_key, page):
            return False
        self.allocator.hold(page, CACHE)
        return True

    def unpublish_chain(self, page: int) -> tuple[int, ...]:
        """Takes a page and all pages chained after it out of the cache; returns them, () if not published."""
        pages = self.index_of(page).unpublish_chain(page)
        self._uncache(pages)
        return pages

    def check_integrity(self) -> str:
        """ "" when every rule of protocol.md §2 holds, else the first thing that is wrong. O(pool)."""
        if problem := self.allocator.check_integrity():
            return problem
        if problem := "".join(index.check_integrity() for index in self._indexes):
            return problem
        for page in range(self.num_pages):
            index = self.index_of(page)
            if (page in index) != (CACHE in self.allocator.holders(page)):
                return f"page {page}: published if and only if the cache holds it"
            if index.evictable(page) != self.allocator.evictable(page):
                return f"page {page}: evictable if and only if sealed and the cache alone holds it"
        if sum(map(len, self._indexes)) != sum(CACHE in self.holders(page) for page in range(self.num_pages)):
            return "a page is published outside its home"
        return ""

    @property
    def _every_home(self) -> range:
        return range(self.homes.num_homes)

    def _home_for(self, holder: Holder) -> int:
        home = self.allocator.home_of(holder)
        return max(self._every_home, key=self.available_at) if home is None else home

    def _uncache(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.allocator.drop(page, CACHE)
