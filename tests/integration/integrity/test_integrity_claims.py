"""What a message claims about a page and what is true, between processes: refused or repaired.

The test stands between the workers' exchange streams. `assert_computed_by_decode` is what a refusal looks
like from outside: the text is exact because decode computes what it would not take.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.tcp.reader import TcpPageReader
from kvtransfer.transport import ReadDone, ReaderConfig, ReadRequest, ReadStatus
from pdserve.messages import Ack, Announce, Commit, Finish, Prefilled, Refusal, Refused, TransferMessage
from pdserve.types import FinishReason, Key, SamplingParams
from tests.support import direct as dx
from tests.support.integrity import PROMPT, SAMPLING, Bench

Change = Callable[[Any], Any]
OTHER = tuple(token + 1 for token in PROMPT)


def changing(kind: type, change: Change, index: int | None = None, times: int = 10**6) -> Any:
    """A hook that changes messages of one kind (of one page) the first so many times."""
    left = [times]

    def hook(message: TransferMessage) -> list[TransferMessage]:
        wanted = isinstance(message, kind) and (index is None or getattr(message, "index", None) == index)
        if not wanted or not left[0]:
            return [message]
        left[0] -= 1
        return [change(message)]

    return hook


def page_of(message: Announce, **changes: int) -> Announce:
    return replace(message, page=replace(message.page, **changes))


ANNOUNCES: dict[str, tuple[Change, str]] = {
    "generation-before": (lambda m: page_of(m, generation=m.page.generation + 1), "reads_stale"),
    "generation-ahead": (lambda m: page_of(m, generation=2**63), "reads_stale"),
    "page-beyond-the-pool": (lambda m: page_of(m, page=400), "reads_failed"),
    "page-beyond-all-pools": (lambda m: page_of(m, page=2**32 - 1), "reads_failed"),
    "another-pool": (lambda m: page_of(m, pool_id=m.page.pool_id ^ 1), "reads_failed"),
    "content-key": (lambda m: replace(m, content_key=bytes(16)), "wrong_content_key"),
    "valid-rows": (lambda m: replace(m, valid_rows=15), "wrong_content_key"),
    "digest-every-time": (lambda m: replace(m, digest=bytes(16)), "reads_mismatch"),
}


@pytest.mark.parametrize("what", ANNOUNCES)
async def test_an_announce_that_is_not_true_is_not_believed(bench: Bench, way: str, what: str) -> None:
    change, counter = ANNOUNCES[what]
    bench.relay.to_decode = changing(Announce, change, index=1)
    came = await bench.run(way)
    came.assert_computed_by_decode()
    assert came.decode[counter] >= 1
    assert came.prefill["source_corrupt"] == 0


async def test_an_announce_with_two_digests_ends_the_transfer(bench: Bench, way: str) -> None:
    bench.relay.to_decode = changing(Announce, lambda m: replace(m, digest=bytes(16)), index=1, times=1)
    came = await bench.run(way)
    came.assert_computed_by_decode()


@pytest.mark.parametrize("index", [5, 50, 2**32 - 1])
async def test_a_page_that_was_not_granted_ends_the_transfer(bench: Bench, way: str, index: int) -> None:
    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Announce) and message.index == 1:
            return [replace(message, index=index), message]
        return [message]

    bench.relay.to_decode = to_decode
    came = await bench.run(way)
    came.assert_computed_by_decode()


async def test_two_pages_that_change_places_with_all_their_names(bench: Bench, way: str) -> None:
    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Announce) and message.index in (1, 2):
            return [replace(message, index=3 - message.index)]
        return [message]

    bench.relay.to_decode = to_decode
    came = await bench.run(way)
    came.assert_computed_by_decode()
    assert came.decode["wrong_content_key"] >= 1


async def test_a_page_that_was_freed_before_the_announce(bench: Bench, way: str) -> None:
    """Named exactly as it was: consumed by an earlier request, then free."""
    await bench.run(way, OTHER)
    gone = bench.announced()[1].page
    bench.relay.to_decode = changing(Announce, lambda m: replace(m, page=gone), index=1)
    came = await bench.run(way)
    came.assert_computed_by_decode()
    assert came.decode["reads_stale"] >= 1


async def test_a_page_that_is_reused_between_announce_and_read(bench: Bench, way: str) -> None:
    """Prefill's half ends while an announce is under way; another request computes into that very page."""
    held: list[Announce] = []
    arrived = threading.Event()

    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Announce) and not held:
            held.append(message)
            arrived.set()
        return [] if getattr(message, "key", None) == ask.key else [message]

    ask = bench.ask(way)
    want = await bench.right(way, PROMPT)
    bench.relay.to_decode = to_decode
    call, half = dx.reserve(ask), dx.prefill(ask)
    await asyncio.to_thread(arrived.wait, 30)
    half.cancel()
    await asyncio.gather(half, return_exceptions=True)
    pool, page = bench.prefill.pool, held[0].page.page
    before = pool.read(page)
    while pool.read(page) == before:  # last freed, first taken: some of the next prompts gets it
        await asyncio.gather(*(dx.generate(bench.ask(way, OTHER)) for _ in range(4)))
    bench.relay.tell(ask.direct.d.incarnation, held[0])
    ended = await call.finish()
    await call.close()
    assert call.tokens == want
    assert ended.ledger.decode_computed_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("mine", ["name-and-key", "name"])
async def test_another_tenants_page_of_the_same_tokens(bench: Bench, way: str, mine: str) -> None:
    """It lies sealed in prefill's cache. On tcp the ticket opens our own pages only. On shm decode is trusted
    with the mapped pool, and the bytes are what they are announced as: there the key keeps them apart."""
    await bench.run(way, tenant="other", use_prefix_cache=True, decode_may_hit=False)
    theirs = bench.announced()[0]

    def claim(message: Announce) -> Announce:
        key = theirs.content_key if mine == "name-and-key" else message.content_key
        return replace(message, page=theirs.page, content_key=key)

    bench.relay.to_decode = changing(Announce, claim, index=0)
    came = await bench.run(way)
    if mine == "name-and-key":
        assert came.decode["wrong_content_key"] >= 1
    elif way == "tcp":
        assert came.decode["reads_stale"] >= 1
    if mine == "name-and-key" or way == "tcp":
        came.assert_computed_by_decode()


async def test_another_tenants_cache_is_never_hit(bench: Bench, way: str) -> None:
    await bench.run(way, tenant="other", use_prefix_cache=True)
    came = await bench.run(way, tenant=f"third-{way}", use_prefix_cache=True)
    assert came.ended.ledger.prefill_cached_tokens == 0
    assert came.ended.ledger.decode_hit_tokens == 0
    came.assert_repaired(resent=0)


async def test_a_ticket_opens_the_pages_of_its_own_request_only(bench: Bench) -> None:
    """A reader with a genuine ticket asks prefill's tcp server itself for what is not its own."""
    pool = bench.prefill.pool
    acks: list[TransferMessage] = []
    both = asyncio.Event()
    loop = asyncio.get_running_loop()

    def to_prefill(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Ack | Commit):
            acks.append(message)
            if len({m.key for m in acks}) == 2:  # type: ignore[union-attr]
                loop.call_soon_threadsafe(both.set)
            return []
        return [message]

    bench.relay.to_prefill = to_prefill
    sampling = replace(SAMPLING, max_tokens=200)
    asks = [bench.ask("tcp", tokens, sampling=sampling) for tokens in (PROMPT, OTHER)]
    tickets = {ask.key: _kept_ticket(ask) for ask in asks}
    bench.relay.to_decode = lambda m: [] if isinstance(m, Finish) else [m]  # nothing commits
    running = [asyncio.ensure_future(dx.generate(ask)) for ask in asks]
    await asyncio.wait_for(both.wait(), 30)
    firsts = [
        next(m for m in bench.relay.log if isinstance(m, Announce) and m.key == ask.key) for ask in asks
    ]
    target = memoryview(bytearray(pool.page_bytes))
    mine, theirs = asks
    reader = _reader(bench, pool.page_bytes)
    stolen = await _read(reader, mine.key, tickets[mine.key], firsts[1], target)
    forged = await _read(reader, theirs.key, tickets[mine.key], firsts[1], target)
    assert bytes(target) == bytes(pool.page_bytes), "not a byte was placed"
    own = await _read(reader, mine.key, tickets[mine.key], firsts[0], target)
    reader.close()
    bench.reset()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert (stolen.status, forged.status, own.status) == (
        ReadStatus.STALE,
        ReadStatus.FAILED,
        ReadStatus.GOOD,
    )


def _kept_ticket(ask: dx.Ask) -> bytes:
    """Fixes the ask's ticket, so that the test has the very bytes that decode granted with."""
    value = ask.ticket()
    ask.ticket = lambda: value  # type: ignore[method-assign]
    return value


def _reader(bench: Bench, page_bytes: int) -> TcpPageReader:
    pool = bench.prefill.pool
    return TcpPageReader(
        ReaderConfig(
            endpoint=bench.prefill.peer.tcp, pool_id=pool.pool_id, layout=pool.layout,
            page_bytes=page_bytes, layer_first=0, layer_last=29,
        )
    )  # fmt: skip


async def _read(
    reader: TcpPageReader, key: Key, ticket: bytes, wanted: Announce, target: memoryview
) -> ReadDone:
    done: asyncio.Future[ReadDone] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    request = ReadRequest(
        read_id=id(done), key=key, ticket=ticket, source=wanted.page, index=wanted.index,
        valid_rows=wanted.valid_rows, digest=wanted.digest, target=target,
    )  # fmt: skip
    reader.read(request, lambda d: loop.call_soon_threadsafe(done.set_result, d))
    return await asyncio.wait_for(done, 30)


FINISHES: dict[str, Change] = {
    "a-record-too-few": lambda m: replace(m, num_announced=m.num_announced - 1),
    "another-first-token": lambda m: replace(m, token_id=m.token_id + 1),
    "another-index": lambda m: replace(m, index=1),
    "an-end-that-is-none": lambda m: replace(m, finish=FinishReason.STOP),
    "another-sampler-state": lambda m: replace(m, next_counter=m.next_counter + 1),
    "another-digest": lambda m: replace(m, digest_of_digests=bytes(16)),
}


@pytest.mark.parametrize("what", FINISHES)
async def test_a_finish_that_is_not_true_never_commits(bench: Bench, way: str, what: str) -> None:
    bench.relay.to_decode = changing(Finish, FINISHES[what])
    came = await bench.run(way)
    came.assert_computed_by_decode()
    if what != "another-index":  # that one is plain to see before the pages are there
        assert came.ended.ledger.decode_computed_prompt_tokens == 1, "the pages were good"


@pytest.mark.parametrize(
    ("kind", "index"),
    [(Announce, 1), pytest.param(Announce, 4, marks=pytest.mark.full), (Finish, None)],
    ids=["a-page", "the-tail", "finish"],
)
async def test_what_never_comes_is_not_waited_for_until_the_deadline(
    bench: Bench, way: str, kind: type, index: int | None
) -> None:
    """Prefill lives, renews and repeats; only this never arrives. One lease later decode goes on alone."""
    bench.relay.to_decode = lambda m: (
        [] if isinstance(m, kind) and (index is None or m.index == index) else [m]  # type: ignore[union-attr]
    )
    came = await bench.run(way, deadline_s=60.0)
    came.assert_computed_by_decode()


@pytest.mark.parametrize("first", ["prefill", "grant"])
@pytest.mark.parametrize("differs", ["tokens", "sampling"])
async def test_halves_of_different_requests_are_not_joined(
    bench: Bench, way: str, differs: str, first: str
) -> None:
    """Each half's ticket is genuine; only together they are wrong. Other sampling would show in no page."""
    ask = bench.ask(way)
    wrong = replace(ask, token_ids=OTHER)
    if differs == "sampling":
        wrong = replace(ask, sampling=SamplingParams(max_tokens=4, temperature=5.0, seed=3, ignore_eos=True))

    async def both() -> Any:
        if first == "prefill":
            half = dx.prefill(wrong)
            await dx.until(ask.direct, ask.direct.p, lambda state: not state.idle)
            call = dx.reserve(ask)
        else:
            call = dx.reserve(ask)
            await call.next()
            half = dx.prefill(wrong)
        ended = await call.finish()
        answer = await half
        assert isinstance(answer, Refused | Prefilled)
        if isinstance(answer, Refused):
            assert answer.reason is Refusal.BAD_TICKET
        await call.close()
        return call.tokens, ended

    came = await bench.came(way, await bench.right(way, PROMPT), both())
    came.assert_computed_by_decode()
    assert came.decode["reads_good"] == 0


async def test_pages_of_two_requests_named_by_each_other(bench: Bench, way: str) -> None:
    """Both live, both wait; each announce names the other's page."""
    asks = [bench.ask(way), bench.ask(way, OTHER)]
    wants = [await bench.right(way, ask.token_ids) for ask in asks]
    held: dict[Key, Announce] = {}

    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if not isinstance(message, Announce) or message.index != 1 or len(held) == 2:
            return [message]
        held[message.key] = message
        if len(held) < 2:
            return []
        one, other = held.values()
        return [replace(one, page=other.page), replace(other, page=one.page)]

    bench.relay.to_decode = to_decode
    got = await asyncio.gather(*(dx.generate(ask) for ask in asks))
    assert [tokens for tokens, _ in got] == wants
    for _, ended in got:
        wrong = ended.ledger.transfer.resent_pages + ended.ledger.decode_computed_prompt_tokens
        assert wrong > 0, "it was noticed"
