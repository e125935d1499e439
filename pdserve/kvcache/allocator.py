"""States, holders and generations of pages (protocol.md §2). Pure accounting: no memory, no caching policy.

free --take--> reserved --fill--> filling --seal--> sealed
  ^---------------- last holder dropped ---------------'   (generation + 1)
any held page whose holders are I/O pins only: retiring.  quarantine: for good, in this incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from pdserve.errors import InternalError
from pdserve.kvcache.ages import PageAgeBook
from pdserve.kvcache.homes import Homes
from pdserve.types import PageAges, PageName, UsedState


class HolderKind(StrEnum):
    """Who may hold a page."""

    REQUEST = "request"
    TRANSFER = "transfer"
    CACHE = "cache"
    IO = "io"


class Holder(NamedTuple):
    """One reason why a page is not free. Equal holders are one: holding or dropping twice has no effect."""

    kind: HolderKind
    id: str


CACHE = Holder(HolderKind.CACHE, "prefix")
"""The prefix index's holder; only `PageManager.publish` and eviction use it."""
_QUARANTINE = Holder(HolderKind.IO, "quarantine")
_NOBODY: frozenset[Holder] = frozenset()


class PageState(StrEnum):
    """A page's one primary state; the states add up to the pool."""

    FREE = "free"
    RESERVED = "reserved"
    FILLING = "filling"
    SEALED = "sealed"
    RETIRING = "retiring"
    QUARANTINED = "quarantined"


class PageAllocator:
    """Owns the state of every page of one pool. Only the control thread's `PageManager` calls it.

    Misuse (holding a free page, sealing one that is not filling, …) raises InternalError and changes nothing.
    So does a request that would hold pages of two homes: its rows can be computed on one rank only.
    """

    def __init__(self, num_pages: int, pool_id: int, num_homes: int = 1) -> None:
        """Raises ValueError unless the pages divide over the homes, at least one for each."""
        self.homes = Homes.over(num_pages, num_homes)
        self.num_pages = num_pages
        self.pool_id = pool_id
        self._state = [PageState.FREE] * num_pages
        self._holders: list[set[Holder]] = [set() for _ in range(num_pages)]
        self._generation = [0] * num_pages
        self._valid_rows = [0] * num_pages
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages
        # Last freed, first taken: warm caches, and memory that was never touched stays untouched.
        self._free = [list(reversed(self.homes.pages(home))) for home in range(num_homes)]
        self._num_quarantined = [0] * num_homes
        self._pages_of: dict[Holder, dict[int, None]] = {}
        self._num_pins = 0
        self._changed: dict[int, None] = {}
        self._ages = PageAgeBook(num_pages)
        self._num_transfers = [0] * num_pages
        self.transfer_pages = 0
        """Pages that some transfer holds."""
        self.peak_transfer_pages = 0

    # ---- changes -------------------------------------------------------------------------------------

    def take(self, n: int, holder: Holder, home: int = 0) -> tuple[int, ...] | None:
        """Turns n free pages of a home into reserved pages of `holder`; None (and no change) when fewer are
        free there."""
        _require(holder.kind in (HolderKind.REQUEST, HolderKind.TRANSFER), "only owners take pages")
        self._require_home(holder, home)
        free = self._free[home]
        if n > len(free):
            return None
        pages = tuple(free.pop() for _ in range(n))
        for page in pages:
            self._move(page, PageState.RESERVED)
            self._add(page, holder)
            self._note(page)
        return pages

    def fill(self, page: int) -> None:
        """reserved → filling: rows are about to be written. No effect on a filling or quarantined page."""
        state = self._state[page]
        _require(state in _FILLABLE, "only a reserved page can be filled")
        if state is PageState.RESERVED:
            self._move(page, PageState.FILLING)
            self._note(page)

    def seal(self, page: int, valid_rows: int) -> None:
        """filling → sealed with `valid_rows` rows that count. A quarantined page stays quarantined."""
        state = self._state[page]
        _require(state in _SEALABLE, "only a filling page can be sealed")
        _require(valid_rows > 0, "a sealed page has rows")
        self._valid_rows[page] = valid_rows
        if state is PageState.FILLING:
            self._move(page, PageState.SEALED)
            self._note(page)

    def hold(self, page: int, holder: Holder) -> None:
        """Adds a holder; again: no effect. A free or retiring page can not be held any more."""
        state = self._state[page]
        _require(state not in _UNHOLDABLE, "a free or retiring page can not be held")
        _require(
            holder.kind is not HolderKind.CACHE or state is PageState.SEALED, "only sealed pages are cached"
        )
        self._require_home(holder, self.homes.home(page))
        self._add(page, holder)
        self._note(page)

    def drop(self, page: int, holder: Holder) -> None:
        """Removes a holder; again: no effect. The last one frees the page, and its generation rises."""
        held = self._holders[page]
        if holder not in held or holder == _QUARANTINE:
            return
        held.remove(holder)
        self._forget(page, holder)
        if not held:
            self._release(page)
        elif self._state[page] is not PageState.QUARANTINED and _only_pins(held):
            self._move(page, PageState.RETIRING)
        self._note(page)

    def quarantine(self, page: int) -> None:
        """Takes a held page out of use for this incarnation: its I/O did not end. It never becomes free."""
        _require(self._state[page] is not PageState.FREE, "a free page has nothing to quarantine")
        self._num_quarantined[self.homes.home(page)] += self._state[page] is not PageState.QUARANTINED
        self._move(page, PageState.QUARANTINED)
        self._add(page, _QUARANTINE)
        self._note(page)

    def touch_time(self, now: float) -> None:
        """What happens from here on happens at `now` (seconds): pages in use have an age."""
        self._ages.now = now

    def changed_generations(self) -> list[tuple[int, int]]:
        """(page, generation) of pages freed since the last call. The driver writes them into the mapped
        header before anything writes new bytes into any page."""
        changed = [(page, self._generation[page]) for page in self._changed]
        self._changed.clear()
        return changed

    # ---- questions -----------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def free_at(self, home: int) -> int:
        """Free pages of one home."""
        return len(self._free[home])

    def quarantined_at(self, home: int) -> int:
        """Quarantined pages of one home."""
        return self._num_quarantined[home]

    def home_of(self, holder: Holder) -> int | None:
        """Where the holder's first page lies; None while it holds none."""
        first = next(iter(self._pages_of.get(holder, ())), None)
        return None if first is None else self.homes.home(first)

    @property
    def num_pins(self) -> int:
        """(page, I/O pin) pairs; the mark of quarantine is none."""
        return self._num_pins

    def count(self, state: PageState) -> int:
        """Pages in one state."""
        return self._counts[state]

    def state(self, page: int) -> PageState:
        return self._state[page]

    def holders(self, page: int) -> frozenset[Holder]:
        return frozenset(self._holders[page])

    def generation(self, page: int) -> int:
        return self._generation[page]

    def valid_rows(self, page: int) -> int:
        """Rows that count in a sealed page; 0 before it is sealed."""
        return self._valid_rows[page]

    def name(self, page: int) -> PageName:
        return PageName(pool_id=self.pool_id, page=page, generation=self._generation[page])

    def pages_of(self, holder: Holder) -> tuple[int, ...]:
        """Pages of one holder, in the order in which it came to hold them."""
        return tuple(self._pages_of.get(holder, ()))

    def evictable(self, page: int) -> bool:
        """Sealed, and nobody but the prefix cache holds it."""
        held = self._holders[page]
        return self._state[page] is PageState.SEALED and len(held) == 1 and CACHE in held

    def counts(self) -> dict[PageState, int]:
        """Pages by state; the values add up to num_pages."""
        return dict(self._counts)

    def ages(self, now: float) -> tuple[PageAges, ...]:
        """Pages in use by state and age. O(pages in use)."""
        return self._ages.counts(now)

    def check_integrity(self) -> str:
        """Proves states, holders, counts and the free list against each other; "" when good. O(pool)."""
        for page in range(self.num_pages):
            if problem := self._page_problem(page):
                return f"page {page}: {problem}"
        tally = dict.fromkeys(PageState, 0)
        for state in self._state:
            tally[state] += 1
        free = sorted(page for page in range(self.num_pages) if self._state[page] is PageState.FREE)
        listed = [page for home in range(self.homes.num_homes) for page in sorted(self._free[home])]
        if tally != self._counts or listed != free:  # in this order only if each list has its home's alone
            return "counts or free lists differ from the states"
        if sum(self._num_quarantined) != tally[PageState.QUARANTINED]:
            return "quarantined pages by home differ from the states"
        pairs = {(page, holder) for holder, pages in self._pages_of.items() for page in pages}
        held = {(page, holder) for page in range(self.num_pages) for holder in self._holders[page]}
        if sum(_is_pin(holder) for _, holder in held) != self._num_pins:
            return "the number of I/O pins differs from the holders"
        if pairs != held or not all(self._pages_of.values()):
            return "holder table differs from the pages"
        homes = ({self.homes.home(page) for page in pages} for holder, pages in self._requests())
        return "a request has pages of two homes" if any(len(found) > 1 for found in homes) else ""

    # ---- inside --------------------------------------------------------------------------------------

    def _requests(self) -> Iterable[tuple[Holder, Iterable[int]]]:
        return ((h, pages) for h, pages in self._pages_of.items() if h.kind is HolderKind.REQUEST)

    def _require_home(self, holder: Holder, home: int) -> None:
        if holder.kind is HolderKind.REQUEST:
            _require(self.home_of(holder) in (None, home), "a request's pages lie in one home")

    def _page_problem(self, page: int) -> str:
        state, held = self._state[page], self._holders[page]
        if (state is PageState.FREE) != (not held):
            return "free if and only if nobody holds it"
        if state is PageState.QUARANTINED:
            return "" if _QUARANTINE in held else "quarantined without its holder"
        if (state is PageState.RETIRING) != (bool(held) and _only_pins(held)):
            return "retiring if and only if pins alone hold it"
        if CACHE in held and state is not PageState.SEALED:
            return "cached but not sealed"
        if self._ages.use(page) is not self._use(page):
            return "its age is another use's"
        if (state is PageState.SEALED) and not self._valid_rows[page]:
            return "sealed without rows"
        return ""

    def _move(self, page: int, state: PageState) -> None:
        self._counts[self._state[page]] -= 1
        self._counts[state] += 1
        self._state[page] = state

    def _use(self, page: int) -> UsedState | None:
        state = self._state[page]
        if state is PageState.SEALED:
            return None if self.evictable(page) else UsedState.HELD
        return _USES.get(state)

    def _note(self, page: int) -> None:
        self._ages.note(page, self._use(page))

    def _count_transfer(self, page: int, change: int) -> None:
        before = self._num_transfers[page]
        self._num_transfers[page] = before + change
        self.transfer_pages += bool(before + change) - bool(before)
        self.peak_transfer_pages = max(self.peak_transfer_pages, self.transfer_pages)

    def _add(self, page: int, holder: Holder) -> None:
        if holder not in self._holders[page]:
            self._num_pins += _is_pin(holder)
            if holder.kind is HolderKind.TRANSFER:
                self._count_transfer(page, 1)
        self._holders[page].add(holder)
        self._pages_of.setdefault(holder, {})[page] = None

    def _forget(self, page: int, holder: Holder) -> None:
        self._num_pins -= _is_pin(holder)
        if holder.kind is HolderKind.TRANSFER:
            self._count_transfer(page, -1)
        pages = self._pages_of[holder]
        del pages[page]
        if not pages:
            del self._pages_of[holder]

    def _release(self, page: int) -> None:
        self._move(page, PageState.FREE)
        self._valid_rows[page] = 0
        self._generation[page] += 1
        self._changed[page] = None
        self._free[self.homes.home(page)].append(page)


_USES = {
    PageState.RESERVED: UsedState.GRANTED,
    PageState.FILLING: UsedState.FILLING,
    PageState.RETIRING: UsedState.RETIRING,
    PageState.QUARANTINED: UsedState.QUARANTINED,
}
_FILLABLE = frozenset({PageState.RESERVED, PageState.FILLING, PageState.QUARANTINED})
_SEALABLE = frozenset({PageState.FILLING, PageState.QUARANTINED})
_UNHOLDABLE = frozenset({PageState.FREE, PageState.RETIRING})


def _is_pin(holder: Holder) -> bool:
    return holder.kind is HolderKind.IO and holder != _QUARANTINE


def _only_pins(held: Iterable[Holder]) -> bool:
    return all(holder.kind is HolderKind.IO for holder in held)


def _require(good: bool, rule: str) -> None:
    if not good:
        raise InternalError(f"page accounting: {rule}")
