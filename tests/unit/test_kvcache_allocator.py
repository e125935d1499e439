"""Page states, holders and generations (protocol.md §2)."""

from __future__ import annotations

import pytest

from pdserve.errors import InternalError
from pdserve.kvcache.allocator import CACHE, Holder, HolderKind, PageAllocator, PageState
from pdserve.types import PageName

A = Holder(HolderKind.REQUEST, "a")
B = Holder(HolderKind.TRANSFER, "b")
PIN = Holder(HolderKind.IO, "read-1")


def _sealed(alloc: PageAllocator, holder: Holder = A) -> int:
    pages = alloc.take(1, holder)
    assert pages is not None
    alloc.fill(pages[0])
    alloc.seal(pages[0], 4)
    return pages[0]


def test_a_page_walks_through_its_states_and_comes_back_with_a_new_generation() -> None:
    alloc = PageAllocator(2, 99)
    pages = alloc.take(1, A)
    assert pages == (0,)
    assert alloc.state(0) is PageState.RESERVED
    alloc.fill(0)
    assert alloc.state(0) is PageState.FILLING
    alloc.seal(0, 3)
    assert (alloc.state(0), alloc.valid_rows(0)) == (PageState.SEALED, 3)
    assert alloc.name(0) == PageName(pool_id=99, page=0, generation=0)
    alloc.drop(0, A)
    assert (alloc.state(0), alloc.generation(0), alloc.valid_rows(0)) == (PageState.FREE, 1, 0)
    assert alloc.check_integrity() == ""


def test_generations_that_rose_are_told_once_and_with_the_last_value() -> None:
    alloc = PageAllocator(2, 0)
    for _ in range(3):
        (page,) = alloc.take(1, A) or ()
        alloc.drop(page, A)
    assert alloc.changed_generations() == [(0, 3)]
    assert alloc.changed_generations() == []


def test_taking_more_than_is_free_changes_nothing() -> None:
    alloc = PageAllocator(3, 0)
    alloc.take(2, A)
    before = alloc.counts()
    assert alloc.take(2, A) is None
    assert alloc.counts() == before
    assert alloc.take(0, A) == ()


def test_holders_are_a_set_so_that_twice_is_once() -> None:
    alloc = PageAllocator(1, 0)
    page = _sealed(alloc)
    alloc.hold(page, B)
    alloc.hold(page, B)
    alloc.drop(page, B)
    alloc.drop(page, B)
    assert alloc.holders(page) == {A}
    alloc.drop(page, A)
    alloc.drop(page, A)
    assert alloc.generation(page) == 1


def test_a_page_with_pins_only_retires_until_the_io_ends() -> None:
    alloc = PageAllocator(1, 0)
    page = _sealed(alloc)
    alloc.hold(page, PIN)
    alloc.drop(page, A)
    assert alloc.state(page) is PageState.RETIRING
    assert alloc.take(1, B) is None
    with pytest.raises(InternalError):
        alloc.hold(page, B)
    assert alloc.check_integrity() == ""
    alloc.drop(page, PIN)
    assert alloc.state(page) is PageState.FREE


def test_a_quarantined_page_never_comes_back() -> None:
    alloc = PageAllocator(1, 0)
    page = _sealed(alloc)
    alloc.hold(page, PIN)
    alloc.drop(page, A)
    alloc.quarantine(page)
    alloc.drop(page, PIN)
    for holder in alloc.holders(page):
        alloc.drop(page, holder)
    assert alloc.state(page) is PageState.QUARANTINED
    assert alloc.take(1, A) is None
    assert (alloc.counts()[PageState.QUARANTINED], alloc.changed_generations()) == (1, [])
    assert alloc.check_integrity() == ""


def test_a_running_request_may_go_on_filling_a_quarantined_page() -> None:
    alloc = PageAllocator(1, 0)
    (page,) = alloc.take(1, A) or ()
    alloc.quarantine(page)
    alloc.fill(page)
    alloc.seal(page, 2)
    assert alloc.state(page) is PageState.QUARANTINED


def test_misuse_is_refused_and_changes_nothing() -> None:
    alloc = PageAllocator(3, 0)
    sealed = _sealed(alloc)
    (reserved,) = alloc.take(1, A) or ()
    free = 2
    for misuse in (
        lambda: alloc.hold(free, A),
        lambda: alloc.fill(free),
        lambda: alloc.fill(sealed),
        lambda: alloc.seal(reserved, 1),
        lambda: alloc.seal(sealed, 1),
        lambda: alloc.hold(reserved, CACHE),
        lambda: alloc.quarantine(free),
        lambda: alloc.take(1, PIN),
        lambda: alloc.take(1, CACHE),
    ):
        with pytest.raises(InternalError):
            misuse()
        assert alloc.check_integrity() == ""
    assert alloc.counts()[PageState.FREE] == 1


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0, 0)
