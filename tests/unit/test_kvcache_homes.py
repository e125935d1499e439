"""A pool in several homes: a request's pages lie in one, hits count where they lie, nothing leaks.

The machine compares with a plain model of who holds what; the oracle of a choice tries every home.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.errors import InternalError
from pdserve.kvcache.allocator import CACHE, Holder, HolderKind, PageState
from pdserve.kvcache.homes import Homes
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys

HOMES, EACH = 3, 4


def request(name: str) -> Holder:
    return Holder(HolderKind.REQUEST, name)


def keys_of(tokens: list[int]) -> tuple[bytes, ...]:
    return content_keys(tokens, 1, salt=b"", model="", numerics="")


def cache(manager: PageManager, tokens: list[int], home: int) -> tuple[int, ...]:
    """Computes pages of one token each there and lets go of them."""
    keys, holder = keys_of(tokens), request(f"cache-{home}")
    pages = manager.reserve(len(tokens), holder, home=home)
    assert pages is not None
    for index, page in enumerate(pages):
        manager.fill(page)
        manager.seal(page, 1)
        manager.publish(page, keys[index], keys[index - 1] if index else None)
    manager.drop_all(holder)
    return pages


def test_pages_of_a_home_follow_one_another() -> None:
    homes = Homes.over(12, 3)
    assert [list(homes.pages(home)) for home in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [homes.home(page) for page in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    for pages, number in ((7, 2), (0, 1), (2, 3)):
        with pytest.raises(ValueError, match="home"):
            Homes.over(pages, number)


def test_the_longest_hit_chooses_and_then_the_most_room() -> None:
    manager = PageManager(HOMES * EACH, 1, HOMES)
    assert manager.choose((), 2, [0] * HOMES) == 0
    manager.reserve(1, request("a"), home=0)
    assert manager.choose((), 2, [0] * HOMES) == 1
    cache(manager, [5], 0)
    longer = cache(manager, [5, 6], 2)
    keys = keys_of([5, 6, 7])
    assert manager.choose(keys, 4, [0] * HOMES) == 2
    assert manager.match_and_hold(keys, request("b")) == longer
    assert manager.reserve(2, request("b")) is not None
    assert {manager.homes.home(page) for page in manager.pages_of(request("b"))} == {2}
    assert manager.choose(keys, 4, [0] * HOMES) == 1, "no room beside the hits: cached pages are no reason"
    assert manager.choose(keys, 3, [0] * HOMES) == 0
    assert manager.choose(keys, EACH + 1, [0] * HOMES) is None
    assert manager.choose((), 2, [9, 3, 9]) is None
    assert manager.choose((), 1, [9, 3, 9]) == 1
    assert manager.choose((), 1, [0] * HOMES, 0) == 0
    assert manager.num_usable == EACH


def test_a_request_can_not_have_pages_of_two_homes() -> None:
    manager = PageManager(HOMES * EACH, 1, HOMES)
    (page,) = manager.reserve(1, request("a"), home=1) or ()
    (other,) = cache(manager, [5], 2)
    with pytest.raises(InternalError, match="one home"):
        manager.reserve(1, request("a"), home=0)
    with pytest.raises(InternalError, match="one home"):
        manager.hold(other, request("a"))
    assert manager.match_and_hold(keys_of([5]), request("a")) == (), "its hits are where it is"
    assert manager.reserve(EACH, request("a")) is None, "room elsewhere is none"
    manager.hold(other, Holder(HolderKind.TRANSFER, "a"))
    manager.hold(page, Holder(HolderKind.TRANSFER, "a"))
    assert manager.check_integrity() == ""


def test_the_same_prefix_is_cached_in_every_home_that_computed_it() -> None:
    manager = PageManager(HOMES * EACH, 1, HOMES)
    found = [cache(manager, [1, 2], home) for home in range(HOMES)]
    keys = keys_of([1, 2])
    assert [manager.match(keys, home) for home in range(HOMES)] == found
    manager.unpublish_chain(found[1][0])
    assert [len(manager.match(keys, home)) for home in range(HOMES)] == [2, 0, 2]
    assert manager.num_evictable == 4
    assert manager.available == HOMES * EACH
    assert [manager.available_at(home) for home in range(HOMES)] == [EACH] * HOMES


def test_quarantine_shrinks_what_one_request_can_have_when_no_home_is_whole() -> None:
    manager = PageManager(2 * EACH, 1, 2)
    for home, usable in ((0, EACH), (1, EACH - 1)):
        (page,) = manager.reserve(1, request(f"r{home}"), home=home) or ()
        manager.quarantine(page)
        manager.quarantine(page)
        assert manager.num_usable == usable
    assert manager.check_integrity() == ""


class HomesMachine(RuleBasedStateMachine):
    """Requests come and go over three homes; transfers and pins hold pages anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = PageManager(HOMES * EACH, 7, HOMES)
        self.rows: dict[int, list[int]] = {}
        self.live: set[str] = set()

    names = st.sampled_from(["a", "b", "c", "d", "e"])
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=EACH + 1)

    @rule(name=names, tokens=tokens, spare=st.lists(st.integers(0, 2), min_size=HOMES, max_size=HOMES))
    def start(self, name: str, tokens: list[int], spare: list[int]) -> None:
        """As the scheduler binds: chooses, holds the hits, reserves the rest, computes and publishes it."""
        if name in self.live:
            return
        keys, holder = keys_of(tokens), request(name)
        home = self.manager.choose(keys, len(tokens), spare)
        assert home == self._best(keys, len(tokens), spare)
        if home is None:
            return
        hits = self.manager.match_and_hold(keys, holder, home)
        fresh = self.manager.reserve(len(tokens) - len(hits), holder, home=home, keep_back=spare[home])
        assert fresh is not None
        self.live.add(name)
        for index, page in enumerate(hits):
            assert self.rows[page] == tokens[: index + 1]
        for index, page in enumerate(fresh, len(hits)):
            self.manager.fill(page)
            self.manager.seal(page, 1)
            self.rows[page] = tokens[: index + 1]
            self.manager.publish(page, keys[index], keys[index - 1] if index else None)

    @rule(name=names)
    def grow(self, name: str) -> None:
        home = self.manager.allocator.home_of(request(name))
        room = max(map(self.manager.available_at, range(HOMES) if home is None else [home]))
        pages = self.manager.reserve(1, request(name))
        assert (pages is None) == (room < 1)
        if pages:
            self.live.add(name)

    @rule(name=names)
    def end(self, name: str) -> None:
        self.manager.drop_all(request(name))
        self.live.discard(name)

    @rule(data=st.data(), pin=st.booleans(), name=names)
    def hold(self, data: st.DataObject, pin: bool, name: str) -> None:
        page = data.draw(st.integers(0, HOMES * EACH - 1))
        if self.manager.state(page) not in (PageState.FREE, PageState.RETIRING):
            self.manager.hold(page, Holder(HolderKind.IO if pin else HolderKind.TRANSFER, name))

    @rule(name=names, pin=st.booleans())
    def let_go(self, name: str, pin: bool) -> None:
        self.manager.drop_all(Holder(HolderKind.IO if pin else HolderKind.TRANSFER, name))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if self.manager.num_quarantined < 2:
            pages = self.manager.pages_of(request(data.draw(st.sampled_from(sorted(self.live)))))
            self.manager.quarantine(data.draw(st.sampled_from(pages)))

    def _best(self, keys: tuple[bytes, ...], total: int, spare: list[int]) -> int | None:
        """Every home tried: what would be left is what nobody but the cache holds, less the hits."""
        found = []
        for home in range(HOMES):
            hits = self.manager.match(keys, home)
            left = [
                page
                for page in self.manager.homes.pages(home)
                if not self.manager.holders(page) - {CACHE} and page not in hits
            ]
            if len(left) >= total - len(hits) + spare[home]:
                found.append((-len(hits), -len(left), home))
        return min(found)[2] if found else None

    @invariant()
    def requests_lie_in_one_home_and_accounts_are_right(self) -> None:
        manager = self.manager
        assert manager.check_integrity() == ""
        for name in self.live:
            assert len({manager.homes.home(page) for page in manager.pages_of(request(name))}) <= 1
        assert manager.available == sum(map(manager.available_at, range(HOMES)))

    def teardown(self) -> None:
        """Nothing leaks: with every holder gone all pages are available, but those in quarantine."""
        for name in "abcde":
            for kind in (HolderKind.REQUEST, HolderKind.TRANSFER, HolderKind.IO):
                self.manager.drop_all(Holder(kind, name))
        assert self.manager.available == HOMES * EACH - self.manager.num_quarantined


TestHomesMachine = HomesMachine.TestCase
TestHomesMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
