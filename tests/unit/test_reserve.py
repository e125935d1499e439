"""Taking a request on decode: hits, the local-or-not decision, growth, the floor, what never fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.reserve import Reservation, reserve
from kvtransfer.session.guard import RoleContext, cache_salt
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys
from pdserve.messages import Refusal, Refused, Reserve
from pdserve.types import HandoverMode, Key, PeerRef, SamplingParams

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
    refused = reserve(replace(CTX, floor_pages=37), pages, call(18, max_tokens=10), "D:r")
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s > 0) == (Refusal.FULL, True)
    assert pages.pages_of(ME) == ()
    assert pages.idle


def test_what_fits_no_empty_pool_is_refused_for_good() -> None:
    refused = reserve(CTX, PageManager(8, 7), call(16, max_tokens=17), "D:r")
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.NEVER_FITS
    assert isinstance(reserve(CTX, PageManager(8, 7), call(16, max_tokens=16), "D:r"), Reservation)
