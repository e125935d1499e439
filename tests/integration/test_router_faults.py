"""The router when clients vanish, deadlines pass, workers refuse, and prefill fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import PdserveError
from pdserve.messages import (
    Outcome,
    Prefilled,
    PrefillRequest,
    Refusal,
    Refused,
    Reserve,
)
from pdserve.rpc import convert
from pdserve.types import HandoverMode, Key, Role, WorkerLoad
from tests.support.byte_model import completion
from tests.support.router_kit import FakeWorker, Fleet, fleet, never, refuses

PROMPT = "tell me a story"
IDS = tuple(PROMPT.encode())


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)


async def check_nothing_is_left(running: Fleet) -> None:
    async with AsyncClient(running.router.address) as client:
        status = await client.get_status()
    assert (status.running, status.queued) == (0, 0)
    assert [w.outstanding_tokens for w in status.workers] == [0] * len(status.workers)
    assert [w.outstanding_requests for w in status.workers] == [0] * len(status.workers)


async def label_of(work: Awaitable[object]) -> str:
    with pytest.raises(PdserveError) as caught:
        await work
    return caught.value.label


# ---- clients that go away, and time that runs out ----------------------------------------------------


async def in_prefill(prefill: FakeWorker, decode: FakeWorker) -> Key:
    return await prefill.wait_for("prefill")


async def in_decode(prefill: FakeWorker, decode: FakeWorker) -> Key:
    return await decode.wait_for("paused")


PHASES = [(0, in_prefill), (3, in_decode)]
Phase = Callable[[FakeWorker, FakeWorker], Awaitable[Key]]


@pytest.mark.parametrize(("pause_at", "phase"), PHASES)
@pytest.mark.parametrize("how", ["cancel", "vanish"])
async def test_a_client_that_goes_ends_the_request_on_both_workers(
    how: str, pause_at: int, phase: Phase
) -> None:
    prefill, decode = pair()
    prefill.prefill_script, decode.pause_at = never, pause_at
    async with fleet(prefill, decode) as running:
        client = AsyncClient(running.router.address)
        stream = client.generate(PROMPT, max_tokens=9)
        result = asyncio.ensure_future(stream.result())
        key = await phase(prefill, decode)
        if how == "cancel":
            stream.cancel()
            assert await label_of(result) == "cancelled"
        else:
            await client.close()
            await asyncio.wait([result])
        assert await decode.wait_for("cancel_decode") == key
        if pause_at == 0:
            assert await prefill.wait_for("cancel_prefill") == key
        await check_nothing_is_left(running)
        await client.close()


@pytest.mark.parametrize(("pause_at", "phase"), PHASES)
async def test_a_deadline_ends_the_request_on_both_workers(pause_at: int, phase: Phase) -> None:
    prefill, decode = pair()
    prefill.prefill_script, decode.pause_at = never, pause_at
    async with fleet(prefill, decode) as running:
        stream = running.client.generate(PROMPT, max_tokens=9, deadline_s=0.3)
        result = asyncio.ensure_future(stream.result())
        key = await phase(prefill, decode)
        assert await label_of(result) == "deadline_expired"
        assert await decode.wait_for("cancel_decode") == key
        assert 0 < decode.reserves[0].deadline_s <= 0.3
        assert 0 < prefill.prefills[0].deadline_s <= 0.3
        await check_nothing_is_left(running)


async def test_a_deadline_in_the_queue_never_reaches_a_worker() -> None:
    prefill, _ = pair()
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(prefill, decode) as running:
        assert (await decode.beat(WorkerLoad(draining=True))).accepted
        assert await label_of(running.client.generate(PROMPT, deadline_s=0.1).result()) == "deadline_expired"
        assert not prefill.prefills
        assert not decode.reserves
        await check_nothing_is_left(running)


# ---- workers that refuse -----------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [Refusal.FULL, Refusal.DRAINING, Refusal.STALE_INCARNATION])
async def test_another_decode_worker_is_tried_after_a_refusal(reason: Refusal) -> None:
    prefill = FakeWorker("p", Role.PREFILL)
    decodes = [FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)]
    refuses(reason)(decodes[0])
    prefill.prefill_script = never
    async with fleet(prefill, *decodes) as running:
        result = await running.client.generate(PROMPT, max_tokens=4).result()
        first, second = decodes[0].reserves[0].key, decodes[1].reserves[0].key
        assert await prefill.wait_for("cancel_prefill") == first
        await check_nothing_is_left(running)
    assert result.token_ids == completion(IDS, 4)
    assert (first.request_id, first.epoch, second.epoch) == (second.request_id, 0, 1)
    # A refusal for want of room started nothing, so it does not count as a failed try.
    assert result.epochs == (2 if reason is Refusal.STALE_INCARNATION else 1)


async def test_a_full_worker_is_tried_again_when_a_request_ends_there() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 1
    async with fleet(decode) as running:
        first = asyncio.ensure_future(running.client.generate("first", max_tokens=2).result())
        await decode.wait_for("paused")
        refuses(Refusal.FULL, times=1, retry_after_s=5.0)(decode)
        second = asyncio.ensure_future(running.client.generate("second", max_tokens=2).result())
        await decode.wait_for("reserve")
        while not (await running.client.get_status()).queued:
            continue  # until the refusal is known here
        decode.gate.set()
        assert (await first).token_ids == completion(tuple(b"first"), 2)
        async with asyncio.timeout(3):  # well before the hint: the end of the first made room
            assert (await second).token_ids == completion(tuple(b"second"), 2)


async def test_a_request_that_never_fits_is_told_so_at_once() -> None:
    decode = FakeWorker("d", Role.DECODE)
    refuses(Refusal.NEVER_FITS, times=9)(decode)
    async with fleet(decode) as running:
        assert await label_of(running.client.generate(PROMPT).result()) == "never_fits"
        assert len(decode.reserves) == 1
        await check_nothing_is_left(running)


# ---- prefill that fails: decode goes on alone --------------------------------------------------------


async def refused_prefill(call: PrefillRequest) -> convert.PrefillResult:
    return Refused(key=call.key, reason=Refusal.DRAINING)


async def corrupt_prefill(call: PrefillRequest) -> convert.PrefillResult:
    return Prefilled(key=call.key, outcome=Outcome.SOURCE_CORRUPT)


async def broken_prefill(call: PrefillRequest) -> convert.PrefillResult:
    raise RuntimeError("a fault in the worker")


@pytest.mark.parametrize("script", [refused_prefill, corrupt_prefill, broken_prefill])
async def test_decode_is_switched_to_local_when_prefill_fails(
    script: Callable[[PrefillRequest], Awaitable[convert.PrefillResult]],
) -> None:
    prefill, decode = pair()
    prefill.prefill_script, decode.pause_at = script, 0
    async with fleet(prefill, decode) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=4).result())
        assert await decode.wait_for("switch") == decode.reserves[0].key
        decode.gate.set()
        assert (await result).token_ids == completion(IDS, 4)
        assert (await result).epochs == 1
        assert len(decode.reserves) == 1
        await check_nothing_is_left(running)


async def test_a_killed_prefill_worker_switches_decode_and_gets_no_more_work() -> None:
    prefill, decode = pair()
    prefill.prefill_script, decode.pause_at = never, 0
    async with fleet(prefill, decode) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=4).result())
        await prefill.wait_for("prefill")
        await prefill.kill()
        await decode.wait_for("switch")
        decode.gate.set()
        assert (await result).token_ids == completion(IDS, 4)
        again = await running.client.generate(PROMPT, max_tokens=4).result()
        assert again.token_ids == completion(IDS, 4)
        assert decode.reserves[-1].mode is HandoverMode.LOCAL


async def test_when_decode_lost_the_request_too_it_is_tried_anew() -> None:
    prefill, decode = pair()
    prefill.prefill_script = refused_prefill
    decode.switch_outcome, decode.pause_at = Outcome.UNKNOWN, 0
    async with fleet(prefill, decode) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=4).result())
        await decode.wait_for("switch")
        decode.pause_at, prefill.prefill_script = None, prefill.prefill
        assert (await result).token_ids == completion(IDS, 4)
        assert (await result).epochs == 2


async def test_of_many_that_wait_for_a_full_worker_one_asks_whether_there_is_room() -> None:
    decode = FakeWorker("d", Role.DECODE)
    room, asked = asyncio.Event(), asyncio.Event()

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        if len(decode.reserves) >= 70:
            asked.set()
        if room.is_set():
            async for event in decode.decode(call):
                yield event
        else:
            yield Refused(key=call.key, reason=Refusal.FULL, retry_after_s=0.02)

    decode.decode_script = script
    async with fleet(decode) as running:
        streams = [running.client.generate(f"{n}", max_tokens=1) for n in range(50)]
        results = [asyncio.ensure_future(stream.result()) for stream in streams]
        await asyncio.wait_for(asked.wait(), 20)
        tries = Counter(call.key.request_id for call in decode.reserves)
        assert sum(count > 2 for count in tries.values()) == 1, "the first in the queue asks for all"
        room.set()
        for n, result in enumerate(results):
            assert (await result).token_ids == completion(tuple(b"%d" % n), 1)
        await check_nothing_is_left(running)
