"""Pages in use have a name and an age, and the peak of what transfers hold is kept."""

from __future__ import annotations

from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.types import UsedState

ME = Holder(HolderKind.REQUEST, "me")
MOVE, OTHER = Holder(HolderKind.TRANSFER, "a"), Holder(HolderKind.TRANSFER, "b")
PIN = Holder(HolderKind.IO, "pin")


def ages(pages: PageManager, now: float) -> dict[UsedState, tuple[int, ...]]:
    return {a.state: a.counts for a in pages.ages(now) if sum(a.counts)}


def take(pages: PageManager, count: int, now: float = 0.0) -> tuple[int, ...]:
    pages.touch_time(now)
    taken = pages.reserve(count, ME)
    assert taken is not None
    return taken


def test_a_page_ages_in_its_use_and_starts_anew_in_the_next() -> None:
    pages = PageManager(8, 1)
    page = take(pages, 1, 100.0)[0]
    assert ages(pages, 100.5) == {UsedState.GRANTED: (1, 0, 0, 0)}
    assert ages(pages, 105.0) == {UsedState.GRANTED: (0, 1, 0, 0)}
    assert ages(pages, 130.0) == {UsedState.GRANTED: (0, 0, 1, 0)}
    assert ages(pages, 200.0) == {UsedState.GRANTED: (0, 0, 0, 1)}
    pages.touch_time(200.0)
    pages.fill(page)
    assert ages(pages, 200.5) == {UsedState.FILLING: (1, 0, 0, 0)}
    pages.seal(page, 16)
    assert ages(pages, 200.5) == {UsedState.HELD: (1, 0, 0, 0)}
    pages.drop(page, ME)
    assert ages(pages, 200.5) == {}


def test_what_only_the_cache_holds_is_not_in_use_and_is_young_again_when_held() -> None:
    pages = PageManager(8, 1)
    page = take(pages, 1)[0]
    pages.fill(page)
    pages.seal(page, 16)
    pages.publish(page, b"key", None)
    pages.drop(page, ME)
    assert ages(pages, 50.0) == {}
    pages.touch_time(50.0)
    pages.hold(page, MOVE)
    assert ages(pages, 50.5) == {UsedState.HELD: (1, 0, 0, 0)}
    pages.touch_time(80.0)
    pages.hold(page, PIN)  # another holder of the same use: it goes on ageing
    assert ages(pages, 80.5) == {UsedState.HELD: (0, 0, 1, 0)}
    assert pages.check_integrity() == ""


def test_pinned_and_quarantined_pages_have_names_of_their_own() -> None:
    pages = PageManager(8, 1)
    first, second = take(pages, 2)
    for page in (first, second):
        pages.hold(page, PIN)
        pages.drop(page, ME)
    pages.quarantine(second)
    assert ages(pages, 0.0) == {UsedState.RETIRING: (1, 0, 0, 0), UsedState.QUARANTINED: (1, 0, 0, 0)}
    assert pages.check_integrity() == ""


def test_the_peak_of_pages_held_for_transfers_is_kept() -> None:
    pages = PageManager(8, 1)
    taken = take(pages, 3)
    for page in taken:
        pages.hold(page, MOVE)
        pages.hold(page, MOVE)
    pages.hold(taken[0], OTHER)
    assert pages.allocator.transfer_pages == 3
    pages.drop(taken[0], MOVE)
    assert pages.allocator.transfer_pages == 3
    pages.drop(taken[0], OTHER)
    pages.drop_all(MOVE)
    assert (pages.allocator.transfer_pages, pages.allocator.peak_transfer_pages) == (0, 3)
