"""A decode worker with a prefill worker of another page size: what it reads, pins, keeps and hands on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.entry import Entry, PromptWork
from decode_worker.pulls import Pulls
from decode_worker.reserve import Reservation, reserve
from kvtransfer.effects import Relay, StartRead
from kvtransfer.plan import ReplicaLayout, layout_text
from kvtransfer.session.decode import DecodeSession, DState
from kvtransfer.session.decode_events import Accepted, ReadEnded
from kvtransfer.session.guard import RoleContext, cache_salt
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import page_keys
from pdserve.messages import Announce, Refusal, Refused, Reserve
from pdserve.types import HandoverMode, Key, PageName, PeerRef, SamplingParams

KEY = Key(request_id="r")


def layout(page_size: int, ranks: int) -> str:
    pages = PageLayout(
        num_layers=1, num_kv_heads=2, head_dim=2, page_size=page_size, dtype="float32",
        inner="k[s,h,d] v[s,h,d]",
    )  # fmt: skip
    return layout_text(ReplicaLayout.of(pages, [range(2)] if ranks == 1 else [range(1), range(1, 2)]))


CTX = RoleContext(
    worker_id="d", incarnation=1, page_size=4, max_context=1000, model="m", numerics="n", secret=b"s" * 16,
    growth_tokens=8, layout=layout(4, 1),
)  # fmt: skip
PEER = PeerRef(worker_id="p", incarnation=2, control="", layout=layout(8, 2), numerics="n")


def call(tokens: int, peer: PeerRef = PEER) -> Reserve:
    return Reserve(
        key=KEY, receiver_incarnation=1, ticket=b"", token_ids=tuple(range(tokens)), num_forced=0,
        sampling=SamplingParams(max_tokens=20), tenant="t", mode=HandoverMode.DISAGGREGATED, prefill=peer,
        deadline_s=1.0,
    )  # fmt: skip


def cached(pages: PageManager, tokens: int) -> None:
    keys = page_keys(tuple(range(tokens)), 4, salt=cache_salt("t"), model="m", numerics="n")
    owner, parent = Holder(HolderKind.REQUEST, "other"), None
    for page, key in zip(pages.reserve(len(keys), owner) or (), keys, strict=True):
        pages.fill(page)
        pages.seal(page, 4)
        pages.publish(page, key, parent)
        parent = key
    pages.drop_all(owner)


def taken(pages: PageManager, tokens: int, **more: object) -> Entry:
    held = reserve(CTX, pages, call(tokens), "D:r", **more)  # type: ignore[arg-type]
    assert isinstance(held, Reservation)
    session = DecodeSession(key=KEY, lease_s=10.0, num_ranks=len(held.origin.parts))
    entry = Entry(
        session=session, call=call(tokens), held=held, ticket_until=1e9, accepted_at=0.0, arrival=0.0,
        computing=PromptWork(num_tokens=tokens, page_size=4),
    )  # fmt: skip
    spread = entry.spread
    accepted = Accepted(
        mode=held.mode, num_pages=spread.num_source_pages, hit_pages=spread.source_hits, ticket=b"",
        deadline_at=99.0, num_forced=0, max_tokens=20, verified=spread.source_verified,
    )  # fmt: skip
    session.step(accepted, 0.0)
    return entry


def announce(entry: Entry, index: int) -> Announce:
    return Announce(
        key=KEY, index=index, page=PageName(pool_id=1, page=index, generation=1),
        valid_rows=min(8, entry.held.rows - 8 * index), content_key=entry.held.source_keys[index],
        digest=bytes([index] * 16 + [99] * 16),
    )  # fmt: skip


def pull(pulls: Pulls, entry: Entry, index: int) -> list[StartRead]:
    told = announce(entry, index)
    entry.session.step(told, 0.0)
    effects = pulls.start(entry, told, 0.0)
    return [effect for effect in effects if isinstance(effect, StartRead)]


def finish(pulls: Pulls, entry: Entry, reads: list[StartRead]) -> None:
    for read in reads:
        _, event = pulls.done(read.read_id, ReadStatus.GOOD, read.digest, "shm", (0.0, 0.0))
        assert isinstance(event, ReadEnded)
        entry.session.step(event, 0.0)


def test_wants_are_pages_of_the_source_and_a_page_that_is_there_in_part_is_pulled_whole() -> None:
    pages = PageManager(64, 7)
    cached(pages, 12)
    entry = taken(pages, 30)
    assert entry.held.hit_pages == 3
    assert entry.session.want == (1, 2, 3), "page 1 has four rows that are hits"
    pulls = Pulls(CTX, pages)
    reads = pull(pulls, entry, 1)
    ours = entry.held.pages
    assert [(read.rank, read.digest) for read in reads] == [(0, bytes([1] * 16)), (1, bytes([99] * 16))]
    assert {read.relay for read in reads} == {
        Relay(layout=PEER.layout, span_page=0, num_tokens=8, targets=((1, ours[3]),), held=frozenset({0}))
    }
    assert pages.state(ours[2]) is PageState.SEALED, "the hit is not touched"
    assert [holder.kind for holder in pages.holders(ours[3])].count(HolderKind.IO) == 2


def test_a_page_is_verified_when_all_its_parts_are_and_moves_count_once() -> None:
    pages = PageManager(64, 7)
    entry, pulls = taken(pages, 30), Pulls(CTX, pages)
    one, other = pull(pulls, entry, 0)
    finish(pulls, entry, [one])
    assert entry.session.verified_prefix == 0
    finish(pulls, entry, [other])
    assert entry.session.verified_prefix == 1
    assert entry.moved_pages == 1
    assert entry.spread.known_pages(1) == 2
    assert pages.num_pins == 0


def test_a_read_that_does_not_end_takes_all_its_pages_out_of_use() -> None:
    pages = PageManager(64, 7)
    entry, pulls = taken(pages, 30), Pulls(CTX, pages)
    pull(pulls, entry, 0)
    pulls.tick(10.0)
    pulls.tick(20.0)
    states = [pages.state(page) for page in entry.held.pages[:3]]
    assert states == [PageState.QUARANTINED, PageState.QUARANTINED, PageState.RESERVED]


def test_a_higher_key_keeps_whole_verified_pages_and_none_that_is_still_written() -> None:
    pages = PageManager(64, 7)
    entry, pulls = taken(pages, 30), Pulls(CTX, pages)
    finish(pulls, entry, pull(pulls, entry, 0))
    pull(pulls, entry, 1)
    assert entry.session.state is DState.PULL
    kept = entry.kept(Holder(HolderKind.REQUEST, "D:r"))
    assert kept is not None
    assert set(kept.verified) == {0, 1}
    assert not {2, 3} & set(kept.pages), "these are being written"
    higher = replace(call(30), key=Key(request_id="r", epoch=1))
    held = reserve(CTX, pages, higher, "D:r2", kept)
    assert isinstance(held, Reservation)
    assert held.verified == frozenset({0, 1})
    assert held.spread.source_verified == frozenset({0})


@pytest.mark.parametrize("peer_layout", ["nonsense", layout(8, 1).replace('"head_dim":2', '"head_dim":4')])
def test_a_peer_that_can_not_be_bridged_is_refused_and_nothing_is_held(peer_layout: str) -> None:
    pages = PageManager(64, 7)
    answer = reserve(CTX, pages, call(30, replace(PEER, layout=peer_layout)), "D:r")
    assert isinstance(answer, Refused)
    assert answer.reason is Refusal.INCOMPATIBLE
    assert pages.idle


@pytest.mark.parametrize("digest", [b"", bytes(16), bytes(31), bytes(33), bytes(48)])
def test_a_digest_of_another_number_of_ranks_is_no_page_of_ours(digest: bytes) -> None:
    """It would be found out of shape when all of them are digested, with nobody there to blame."""
    entry = taken(PageManager(64, 7), 30)
    assert entry.held.expects(announce(entry, 0))
    assert not entry.held.expects(replace(announce(entry, 0), digest=digest))


def test_the_end_of_a_page_that_no_page_of_theirs_reaches_is_cleared_first() -> None:
    pages = PageManager(64, 7)
    ctx = replace(CTX, page_size=16, layout=layout(16, 1))
    held = reserve(ctx, pages, call(20), "D:r")
    assert isinstance(held, Reservation)
    assert [held.spread.covers(page) for page in range(2)] == [True, False]
    entry = taken(pages, 30)
    assert not [read.blank for read in pull(Pulls(CTX, pages), entry, 3) if read.blank], "theirs are larger"


def test_pages_of_other_numerics_are_refused_unless_mixing_is_relaxed() -> None:
    pages, foreign = PageManager(64, 7), call(30, replace(PEER, numerics="other"))
    answer = reserve(CTX, pages, foreign, "D:r")
    assert isinstance(answer, Refused)
    assert answer.reason is Refusal.INCOMPATIBLE
    assert pages.idle


def test_pages_of_other_numerics_never_go_by_our_keys() -> None:
    """Neither into the cache nor to a higher key of the request, whose prefill worker may be like us."""
    pages, relaxed = PageManager(64, 7), replace(CTX, kv_mixing="relaxed")
    held = reserve(relaxed, pages, call(30, replace(PEER, layout="", numerics="other")), "D:r")
    assert isinstance(held, Reservation)
    assert held.foreign
    others = PageManager(64, 7)
    entry, pulls = taken(others, 30), Pulls(CTX, others)
    finish(pulls, entry, pull(pulls, entry, 0))
    entry.held = replace(entry.held, foreign=True)
    kept = entry.kept(Holder(HolderKind.REQUEST, "D:r"))
    assert kept is not None
    assert not kept.verified


def test_pages_of_other_numerics_have_the_keys_of_those() -> None:
    relaxed = replace(CTX, kv_mixing="relaxed")
    held = reserve(relaxed, PageManager(64, 7), call(30, replace(PEER, layout="", numerics="other")), "D:r")
    assert isinstance(held, Reservation)
    assert held.source_keys == page_keys(
        tuple(range(30)), 4, salt=cache_salt("t"), model="m", numerics="other"
    )
    assert held.keys != held.source_keys
