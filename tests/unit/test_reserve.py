"""Taking a request on decode: hits, the local-or-not decision, growth, the floor, what never fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.entry import Entry, PromptWork
from decode_worker.reserve import Kept, Reservation, reserve
from kvtransfer.session import decode_events as table
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.guard import RoleContext, cache_salt
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys
from pdserve.messages import Announce, Refusal, Refused, Reserve
from pdserve.types import HandoverMode, Key, PageName, PeerRef, SamplingParams

CTX = RoleContext(
    worker_id="d", incarnation=1, page_size=4, max_context=1000, model="m", numerics="n", secret=b"s" * 16,
    growth_tokens=8,
)  # fmt: skip
PEER = PeerRef(worker_id="p", incarnation=2, control="")
ME = Holder(HolderKind.REQUEST, "D:r")


def call(tokens: int, *, max_tokens: int = 100, mode: HandoverMode = HandoverMode.DISAGGREGATED) -> Reserve:
    return Reserve(
        key=Key(request_id="r"), receiver_incarnation=1, ticket=b"", token_ids=tuple(range(tokens)),
        num_forced=0, sampling=SamplingParams(max_tokens=max_tokens), tenant="t", mode=mode,
        prefill=None if mode is HandoverMode.LOCAL else PEER, deadline_s=1.0,
    )  # fmt: skip


def cached(pages: PageManager, tokens: int) -> None:
    """Puts the first full pages of these tokens into the prefix cache."""
    keys = content_keys(tuple(range(tokens)), 4, salt=cache_salt("t"), model="m", numerics="n")
    owner = Holder(HolderKind.REQUEST, "other")
    parent = None
    for page, key in zip(pages.reserve(len(keys), owner) or (), keys, strict=True):
        pages.fill(page)
        pages.seal(page, 4)
        pages.publish(page, key, parent)
        parent = key
    pages.drop_all(owner)


def test_prompt_and_growth_are_reserved_less_the_hits() -> None:
    pages = PageManager(64, 7)
    cached(pages, 12)
    held = reserve(CTX, pages, call(18), "D:r")
    assert isinstance(held, Reservation)
    assert (held.hit_pages, held.num_pages, len(held.pages)) == (3, 5, 7)  # 18 + 8 tokens are 7 pages
    assert set(pages.pages_of(ME)) == set(held.pages)
    assert len(held.full_keys) == 4
    assert len(held.keys) == 5


def test_hits_never_cover_the_whole_prompt() -> None:
    pages = PageManager(64, 7)
    cached(pages, 16)
    held = reserve(CTX, pages, call(16), "D:r")
    assert isinstance(held, Reservation)
    assert held.hit_pages == 3


@pytest.mark.parametrize(("threshold", "local"), [(0, False), (6, False), (7, True), (100, True)])
def test_the_uncached_part_decides_who_computes(threshold: int, local: bool) -> None:
    pages = PageManager(64, 7)
    cached(pages, 12)
    held = reserve(replace(CTX, local_prefill_threshold=threshold), pages, call(18), "D:r")
    assert isinstance(held, Reservation)
    assert (held.mode is HandoverMode.LOCAL) == local
    assert (held.pages == ()) == local, "a local prompt holds nothing until its turn"


def test_no_growth_beyond_what_may_be_made() -> None:
    held = reserve(CTX, PageManager(64, 7), call(6, max_tokens=2), "D:r")
    assert isinstance(held, Reservation)
    assert len(held.pages) == 2


def test_the_prefill_floor_stays_free_and_a_refusal_holds_nothing() -> None:
    pages = PageManager(40, 7)
    cached(pages, 12)
    pages.reserve(4, Holder(HolderKind.REQUEST, "other"))
    refused = reserve(replace(CTX, floor_pages=30), pages, call(18, max_tokens=10), "D:r")
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s > 0) == (Refusal.FULL, True)
    assert pages.pages_of(ME) == ()
    assert pages.available == 36


def test_the_floor_gives_way_to_what_could_never_be_reserved_otherwise() -> None:
    pages = PageManager(8, 7)
    assert isinstance(reserve(replace(CTX, floor_pages=4), pages, call(20, max_tokens=4), "D:r"), Reservation)
    pages.drop_all(ME)
    pages.reserve(1, Holder(HolderKind.REQUEST, "other"))
    late = reserve(replace(CTX, floor_pages=4), pages, call(20, max_tokens=4), "D:r")
    assert isinstance(late, Refused)
    assert late.reason is Refusal.FULL


def test_pages_in_quarantine_do_not_count_as_pool() -> None:
    pages = PageManager(8, 7)
    (page,) = pages.reserve(1, Holder(HolderKind.REQUEST, "other")) or ()
    pages.quarantine(page)
    refused = reserve(CTX, pages, call(16, max_tokens=16), "D:r")
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.NEVER_FITS
    assert refused.retry_after_s > 0, "another worker may have the pages"


LOWER = Holder(HolderKind.REQUEST, "D:lower")


def lower(pages: PageManager, tokens: int, *, verified: int, reading: frozenset[int] = frozenset()) -> Kept:
    """A lower key of the same request with `verified` pages proven and some still being read."""
    held = reserve(CTX, pages, call(tokens, max_tokens=8), "D:lower")
    assert isinstance(held, Reservation)
    for index in {*range(verified), *reading}:
        pages.fill(held.pages[index])
    own = {i: p for i, p in enumerate(held.pages) if i not in reading}
    return Kept(holder=LOWER, pages=own, verified={i: held.keys[i] for i in range(verified)})


def test_a_higher_key_takes_the_lower_ones_pages_over_without_any_other() -> None:
    pages = PageManager(8, 7)
    kept = lower(pages, 20, verified=2)
    held = reserve(CTX, pages, call(20, max_tokens=8), "D:r", kept)
    assert isinstance(held, Reservation)
    assert held.verified == frozenset({0, 1})
    assert held.pages == tuple(kept.pages.values())
    assert set(pages.pages_of(ME)) == set(held.pages)
    assert pages.pages_of(LOWER) == ()


def test_pages_that_a_read_may_still_write_stay_with_the_lower_key() -> None:
    pages = PageManager(16, 7)
    kept = lower(pages, 20, verified=1, reading=frozenset({1}))
    held = reserve(CTX, pages, call(20, max_tokens=8), "D:r", kept)
    assert isinstance(held, Reservation)
    (left,) = pages.pages_of(LOWER)
    assert left not in held.pages
    assert pages.state(held.pages[1]) is PageState.RESERVED, "a fresh one in its place"


def test_a_takeover_that_does_not_fit_costs_the_lower_key_nothing() -> None:
    pages = PageManager(7, 7)
    kept = lower(pages, 20, verified=1, reading=frozenset({1}))
    before = pages.pages_of(LOWER)
    assert isinstance(reserve(CTX, pages, call(20, max_tokens=8), "D:r", kept), Refused)
    assert pages.pages_of(LOWER) == before
    assert pages.pages_of(ME) == ()


def test_only_pages_under_the_same_content_key_count_as_verified() -> None:
    pages = PageManager(64, 7)
    kept = lower(pages, 20, verified=3)
    other = replace(call(20, max_tokens=8), token_ids=(*range(4), *range(100, 116)))
    held = reserve(CTX, pages, other, "D:r", kept)
    assert isinstance(held, Reservation)
    assert held.verified == frozenset({0})


def test_what_is_verified_decides_too_who_computes_and_its_pages_stay() -> None:
    pages = PageManager(64, 7)
    kept = lower(pages, 20, verified=4)
    held = reserve(replace(CTX, local_prefill_threshold=8), pages, call(20, max_tokens=8), "D:r", kept)
    assert isinstance(held, Reservation)
    assert held.mode is HandoverMode.LOCAL
    assert held.known_rows == 16
    assert held.pages


def test_what_fits_no_empty_pool_is_refused_for_good() -> None:
    refused = reserve(CTX, PageManager(8, 7), call(16, max_tokens=17), "D:r")
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.NEVER_FITS
    assert isinstance(reserve(CTX, PageManager(8, 7), call(16, max_tokens=16), "D:r"), Reservation)


def test_a_higher_key_takes_no_page_that_lies_behind_one_that_never_arrived_intact() -> None:
    """Prefill may have computed it from the bad one: its digest is right then, and its content is not."""
    pages = PageManager(8, 7)
    made = call(20, max_tokens=8)
    held = reserve(CTX, pages, made, "D:lower")
    assert isinstance(held, Reservation)
    session = DecodeSession(key=made.key, lease_s=10.0)
    accepted = table.Accepted(
        mode=held.mode, num_pages=held.num_pages, hit_pages=0, ticket=b"", deadline_at=99.0, num_forced=0,
        max_tokens=8,
    )  # fmt: skip
    session.step(accepted, 0.0)
    for index in (0, 2, 3):
        session.step(announced(held, index), 0.0)
        session.step(table.ReadEnded(index=index, status=ReadStatus.GOOD, digest=bytes(16)), 0.0)
    entry = Entry(
        session=session, call=made, held=held, ticket_until=9.0, accepted_at=0.0, arrival=0.0,
        computing=PromptWork(num_tokens=20, page_size=CTX.page_size),
    )  # fmt: skip
    kept = entry.kept(LOWER)
    assert kept is not None
    assert set(kept.verified) == {0}
    assert set(kept.pages) == set(range(len(held.pages))), "their memory passes on all the same"


def announced(held: Reservation, index: int) -> Announce:
    return Announce(
        key=Key(request_id="r"), index=index, page=PageName(pool_id=1, page=index, generation=1),
        valid_rows=4, content_key=held.keys[index], digest=bytes(16),
    )  # fmt: skip
