"""Taking a request on decode where the pool has homes: one for all its pages, hits and others' too."""

from __future__ import annotations

from dataclasses import replace

from decode_worker.reserve import Kept, Reservation, reserve
from kvtransfer.session.guard import cache_salt
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys
from pdserve.messages import Refusal, Refused
from pdserve.types import HandoverMode
from tests.unit.test_reserve import CTX, ME, call

EACH = 8


def cached(pages: PageManager, tokens: int, home: int) -> None:
    """Puts the first full pages of these tokens into that home's prefix cache."""
    keys = content_keys(tuple(range(tokens)), 4, salt=cache_salt("t"), model="m", numerics="n")
    owner = Holder(HolderKind.REQUEST, "other")
    parent = None
    for page, key in zip(pages.reserve(len(keys), owner, home=home) or (), keys, strict=True):
        pages.fill(page)
        pages.seal(page, 4)
        pages.publish(page, key, parent)
        parent = key
    pages.drop_all(owner)


def homes_of(pages: PageManager, held: Reservation) -> set[int]:
    assert set(pages.pages_of(ME)) == set(held.pages)
    return {pages.homes.home(page) for page in held.pages}


def test_a_request_goes_where_its_prefix_is_and_else_where_there_is_room() -> None:
    pages = PageManager(3 * EACH, 7, 3)
    cached(pages, 12, 2)
    cached(pages, 4, 1)
    held = reserve(CTX, pages, call(18, max_tokens=8), "D:r")
    assert isinstance(held, Reservation)
    assert (held.hit_pages, len(held.pages)) == (3, 7)
    assert homes_of(pages, held) == {2}
    again = reserve(CTX, pages, call(18, max_tokens=8), "D:second")  # no room there beside the hits
    assert isinstance(again, Reservation)
    assert again.hit_pages == 1
    assert {pages.homes.home(page) for page in again.pages} == {1}


def test_room_that_lies_in_two_homes_is_none() -> None:
    pages = PageManager(2 * EACH, 7, 2)
    for home in range(2):
        pages.reserve(2, Holder(HolderKind.REQUEST, f"other-{home}"), home=home)
    refused = reserve(CTX, pages, call(24, max_tokens=4), "D:r")
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.FULL
    assert pages.pages_of(ME) == ()
    never = reserve(CTX, pages, call(24, max_tokens=9), "D:r")
    assert isinstance(never, Refused)
    assert never.reason is Refusal.NEVER_FITS


def test_the_floor_is_left_in_the_home_that_is_taken() -> None:
    pages = PageManager(2 * EACH, 7, 2)
    pages.reserve(4, Holder(HolderKind.REQUEST, "other"), home=0)
    held = reserve(replace(CTX, floor_pages=4), pages, call(8, max_tokens=8), "D:r")
    assert isinstance(held, Reservation)
    assert homes_of(pages, held) == {1}
    refused = reserve(replace(CTX, floor_pages=4), pages, call(8, max_tokens=8), "D:second")
    assert isinstance(refused, Refused)


def test_what_is_taken_over_stays_where_it_is_whatever_the_cache_has_elsewhere() -> None:
    pages = PageManager(2 * EACH, 7, 2)
    lower = Holder(HolderKind.REQUEST, "D:lower")
    first = reserve(CTX, pages, call(20, max_tokens=8), "D:lower")
    assert isinstance(first, Reservation)
    home = pages.homes.home(first.pages[0])
    for index in (0, 1):
        pages.fill(first.pages[index])
    cached(pages, 16, 1 - home)
    kept = Kept(holder=lower, pages=dict(enumerate(first.pages)), verified={i: first.keys[i] for i in (0, 1)})
    held = reserve(CTX, pages, call(20, max_tokens=8), "D:r", kept)
    assert isinstance(held, Reservation)
    assert held.pages == first.pages
    assert held.verified == frozenset({0, 1})
    assert pages.check_integrity() == ""


def test_a_local_request_holds_nothing_until_its_turn_comes() -> None:
    pages = PageManager(2 * EACH, 7, 2)
    cached(pages, 8, 1)
    held = reserve(CTX, pages, call(10, max_tokens=8, mode=HandoverMode.LOCAL), "D:r")
    assert isinstance(held, Reservation)
    assert held.pages == pages.pages_of(ME) == ()
