"""The manager: reserve with eviction, prefix hits, publishing, and a stateful run against a plain model."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.errors import InternalError
from pdserve.kvcache.allocator import CACHE, Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys


def _request(name: str) -> Holder:
    return Holder(HolderKind.REQUEST, name)


def _keys(token_ids: list[int], salt: bytes = b"") -> tuple[bytes, ...]:
    return content_keys(token_ids, 1, salt=salt, model="m", numerics="n")


def _cached(manager: PageManager, token_ids: list[int], name: str = "x") -> tuple[int, ...]:
    """Computes and publishes one page per token, then lets go; returns the pages published."""
    keys, holder = _keys(token_ids), _request(name)
    hits = manager.match_and_hold(keys, holder)
    fresh = manager.reserve(len(keys) - len(hits), holder)
    assert fresh is not None
    for index, page in enumerate(fresh, len(hits)):
        manager.fill(page)
        manager.seal(page, 1)
        assert manager.publish(page, keys[index], keys[index - 1] if index else None)
    manager.drop_all(holder)
    return hits + fresh


def test_cached_pages_are_available_and_the_pool_is_idle() -> None:
    manager = PageManager(4, 0)
    pages = _cached(manager, [1, 2, 3])
    assert (manager.num_free, manager.num_evictable, manager.available) == (1, 3, 4)
    assert manager.idle
    assert manager.counts()[PageState.SEALED] == 3
    assert manager.match_and_hold(_keys([1, 2, 9]), _request("y")) == pages[:2]
    assert not manager.idle
    assert manager.available == 2


def test_another_tenants_salt_finds_nothing() -> None:
    manager = PageManager(4, 0)
    _cached(manager, [1, 2])
    assert manager.match(_keys([1, 2], salt=b"other")) == ()


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    manager = PageManager(5, 0)
    old = _cached(manager, [1, 2])
    new = _cached(manager, [1, 3, 4])
    assert manager.reserve(2, _request("r")) is not None  # one free, one evicted
    assert manager.match(_keys([1, 2])) == old[:1]
    assert manager.match(_keys([1, 3, 4])) == new
    manager.reserve(1, _request("r"))
    assert manager.match(_keys([1, 3, 4])) == new[:2]
    assert manager.check_integrity() == ""


def test_a_hit_renews_what_it_uses() -> None:
    manager = PageManager(2, 0)
    first = _cached(manager, [1])
    _cached(manager, [2])
    manager.match_and_hold(_keys([1]), _request("y"))
    manager.drop_all(_request("y"))
    manager.reserve(1, _request("r"))
    assert manager.match(_keys([1])) == first
    assert manager.match(_keys([2])) == ()


def test_a_parent_can_go_although_its_child_is_held_by_others() -> None:
    manager = PageManager(3, 0)
    parent, child, leaf = _cached(manager, [1, 2, 3])
    transfer = Holder(HolderKind.TRANSFER, "t")
    manager.hold(leaf, transfer)
    assert manager.available == 2
    pages = manager.reserve(1, _request("r"))
    assert pages == (child,)  # as little as possible is lost
    assert manager.match(_keys([1, 2, 3])) == (parent,)
    assert manager.holders(leaf) == {transfer}
    assert manager.reserve(1, _request("r")) == (parent,)
    assert manager.reserve(1, _request("r")) is None
    assert manager.check_integrity() == ""


def test_as_little_as_possible_is_lost_whatever_was_released_first() -> None:
    manager = PageManager(3, 0)
    pages = _cached(manager, [1, 2, 3])
    transfer = Holder(HolderKind.TRANSFER, "t")
    for page in pages:
        manager.hold(page, transfer)
    manager.drop(pages[0], transfer)
    manager.drop(pages[1], transfer)
    assert manager.reserve(1, _request("r")) == pages[1:2]
    assert manager.match(_keys([1, 2, 3])) == pages[:1]


def test_an_old_chain_goes_page_by_page_before_a_newer_one() -> None:
    manager = PageManager(4, 0)
    old = _cached(manager, [1, 2, 3])
    new = _cached(manager, [4])
    manager.reserve(2, _request("r"))
    assert manager.match(_keys([1, 2, 3])) == old[:1]
    assert manager.match(_keys([4])) == new


def test_reserve_keeps_pages_back_and_changes_nothing_when_it_refuses() -> None:
    manager = PageManager(4, 0)
    pages = _cached(manager, [1, 2])
    assert manager.reserve(3, _request("r"), keep_back=2) is None
    assert manager.match(_keys([1, 2])) == pages
    assert manager.reserve(2, _request("r"), keep_back=2) is not None


def test_the_second_of_two_equal_pages_stays_private_but_its_successor_is_published() -> None:
    manager = PageManager(4, 0)
    keys = _keys([1, 2])
    (first,) = _cached(manager, [1])
    mine = manager.reserve(2, _request("r")) or ()
    for page in mine:
        manager.fill(page)
        manager.seal(page, 1)
    assert not manager.publish(mine[0], keys[0], None)
    assert manager.publish(mine[1], keys[1], keys[0])
    assert manager.match(keys) == (first, mine[1])
    manager.drop_all(_request("r"))
    assert manager.state(mine[0]) is PageState.FREE
    assert manager.idle


def test_unpublishing_takes_all_that_is_chained_after_a_page() -> None:
    manager = PageManager(6, 0)
    root, *rest = _cached(manager, [1, 2, 3])
    (_, other) = _cached(manager, [1, 9])
    manager.match_and_hold(_keys([1, 2, 3]), _request("y"))
    assert set(manager.unpublish_chain(rest[0])) == set(rest)
    assert manager.match(_keys([1, 2, 3])) == (root,)
    assert manager.match(_keys([1, 9])) == (root, other)
    assert all(manager.holders(page) == {_request("y")} for page in rest)
    assert manager.unpublish_chain(rest[0]) == ()
    manager.drop_all(_request("y"))
    assert manager.idle
    assert manager.check_integrity() == ""


def test_only_sealed_pages_with_a_reachable_parent_are_published() -> None:
    manager = PageManager(3, 0)
    keys = _keys([1, 2])
    (page,) = manager.reserve(1, _request("r")) or ()
    assert not manager.publish(page, keys[0], None)
    manager.fill(page)
    manager.seal(page, 1)
    assert not manager.publish(page, keys[1], keys[0])
    assert manager.publish(page, keys[0], None)
    assert not manager.publish(page, keys[1], keys[0])


def test_a_pinned_cached_page_is_not_evictable_and_quarantine_takes_it_out_of_the_cache() -> None:
    manager = PageManager(2, 0)
    pages = _cached(manager, [1, 2])
    pin = Holder(HolderKind.IO, "send")
    manager.hold(pages[0], pin)
    assert manager.available == 1
    manager.quarantine(pages[0])
    assert manager.match(_keys([1, 2])) == ()
    assert manager.state(pages[1]) is PageState.FREE
    manager.drop(pages[0], pin)
    assert manager.counts()[PageState.QUARANTINED] == 1
    assert not manager.idle
    assert manager.check_integrity() == ""


def test_the_caches_holder_is_the_managers_own() -> None:
    manager = PageManager(1, 0)
    (page,) = _cached(manager, [1])
    with pytest.raises(ValueError, match="cache"):
        manager.drop(page, CACHE)
    with pytest.raises(ValueError, match="cache"):
        manager.hold(page, CACHE)


class ManagerMachine(RuleBasedStateMachine):
    """Random use by well-behaved owners, compared with a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = PageManager(9, 7)
        self.held: dict[int, set[Holder]] = {}
        self.rows: dict[int, list[int]] = {}
        self.quarantined: set[int] = set()
        self.generations: dict[int, int] = {}

    # Few names and tokens, so that chains meet.
    names = st.sampled_from(["a", "b", "c"])
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5)

    @rule(name=names, n=st.integers(0, 5), keep_back=st.integers(0, 2))
    def reserve(self, name: str, n: int, keep_back: int) -> None:
        available = self.manager.available
        pages = self.manager.reserve(n, _request(name), keep_back=keep_back)
        assert (pages is None) == (available < n + keep_back)
        for page in pages or ():
            assert page not in self.held
            self.held[page] = {_request(name)}
            self.rows.pop(page, None)

    @rule(name=names, token_ids=tokens)
    def compute(self, name: str, token_ids: list[int]) -> None:
        """One page per token: hits are held, the rest is reserved, filled, sealed and published."""
        keys, holder = _keys(token_ids), _request(name)
        hits = self.manager.match_and_hold(keys, holder)
        for page, index in zip(hits, range(len(hits)), strict=True):
            assert self.rows[page] == token_ids[: index + 1]
            self.held.setdefault(page, set()).add(holder)
        fresh = self.manager.reserve(len(keys) - len(hits), holder) or ()
        for index, page in enumerate(fresh, len(hits)):
            self.held[page] = {holder}
            self.manager.fill(page)
            self.manager.seal(page, 1)
            self.rows[page] = token_ids[: index + 1]
            self.manager.publish(page, keys[index], keys[index - 1] if index else None)

    @rule(name=names)
    def drop_all(self, name: str) -> None:
        dropped = self.manager.drop_all(_request(name))
        assert set(dropped) == {page for page, held in self.held.items() if _request(name) in held}
        for page in dropped:
            self._let_go(page, _request(name))

    @rule(data=st.data(), pin=st.booleans(), name=names)
    def hold(self, data: st.DataObject, pin: bool, name: str) -> None:
        holder = Holder(HolderKind.IO if pin else HolderKind.TRANSFER, name)
        page = data.draw(st.integers(0, 8))
        if self.manager.state(page) in (PageState.FREE, PageState.RETIRING):
            with pytest.raises(InternalError):
                self.manager.hold(page, holder)
            return
        self.manager.hold(page, holder)
        self.held.setdefault(page, set()).add(holder)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        holder = data.draw(st.sampled_from(sorted(self.held[page])))
        self.manager.drop(page, holder)
        self.manager.drop(page, holder)
        self._let_go(page, holder)

    @rule(page=st.integers(0, 8))
    def unpublish(self, page: int) -> None:
        self.manager.unpublish_chain(page)

    @precondition(lambda self: self.held and len(self.quarantined) < 2)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.manager.quarantine(page)
        self.quarantined.add(page)

    @invariant()
    def accounts_are_right(self) -> None:
        manager = self.manager
        assert manager.check_integrity() == ""
        assert sum(manager.counts().values()) == manager.num_pages
        for page in range(manager.num_pages):
            others = {
                holder for holder in manager.holders(page) if holder != CACHE and holder.id != "quarantine"
            }
            assert others == self.held.get(page, set())
        used = len(self.held.keys() | self.quarantined)
        assert manager.available == manager.num_pages - used
        assert manager.idle == (used == 0)

    @invariant()
    def generations_only_rise(self) -> None:
        for page, generation in self.manager.changed_generations():
            assert generation > self.generations.get(page, 0)
            self.generations[page] = generation
        for page in range(self.manager.num_pages):
            assert self.manager.generation(page) == self.generations.get(page, 0)

    def _let_go(self, page: int, holder: Holder) -> None:
        self.held[page].discard(holder)
        if not self.held[page]:
            del self.held[page]


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
