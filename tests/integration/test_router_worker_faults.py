"""The router when decode workers break, lie, fall silent, leave or return, and when it is overloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from pdserve.client import AsyncClient
from pdserve.clock import ManualClock
from pdserve.errors import PdserveError
from pdserve.messages import (
    Ended,
    Reserve,
    Reserved,
    Token,
)
from pdserve.rpc import convert
from pdserve.types import FinishReason, Key, Role, WorkerLoad
from tests.support.byte_model import completion
from tests.support.router_kit import FakeWorker, Fleet, fleet, until_ready

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


# ---- decode that fails: the stream goes on elsewhere, exactly ----------------------------------------


async def test_a_killed_decode_worker_is_replaced_in_the_middle_of_a_stream() -> None:
    prefill = FakeWorker("p", Role.PREFILL)
    decodes = [FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)]
    decodes[0].pause_at = 5
    async with fleet(prefill, *decodes) as running:
        stream = running.client.generate(PROMPT, max_tokens=12, seed=3, temperature=0.5)
        result = asyncio.ensure_future(stream.result())
        await decodes[0].wait_for("paused")
        await decodes[0].kill()
        done = await result
        await check_nothing_is_left(running)
    assert done.token_ids == completion(IDS, 12)
    assert done.epochs == 2
    first, second = decodes[0].reserves[0], decodes[1].reserves[0]
    assert second.key > first.key
    assert second.num_forced == 5
    assert second.token_ids == IDS + completion(IDS, 5)
    assert second.sampling == first.sampling
    assert done.usage.prompt_tokens == len(IDS)


async def test_with_one_decode_worker_the_stream_waits_for_its_successor() -> None:
    prefill, decode = pair()
    decode.pause_at = 2
    successor = FakeWorker("d", Role.DECODE)
    async with fleet(prefill, decode) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=6).result())
        await decode.wait_for("paused")
        await decode.kill()
        await until_ready(running.router.address, ready=False)
        assert not result.done()
        await successor.start()
        assert (await successor.join(running.router.address)).accepted
        assert (await result).token_ids == completion(IDS, 6)
        status = await running.client.get_status()
        assert successor.incarnation in {w.record.peer.incarnation for w in status.workers}
        assert decode.incarnation not in {w.record.peer.incarnation for w in status.workers}
        await successor.kill()


Misbehaviour = Callable[[FakeWorker, Reserve], AsyncIterator[convert.DecodeEvent]]


async def skips(worker: FakeWorker, call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
    async for event in worker.decode(call):
        if not (isinstance(event, Token) and event.index == 2):
            yield event


async def closes_early(worker: FakeWorker, call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
    async for event in worker.decode(call):
        if isinstance(event, Token) and event.index == 2:
            return
        yield event


async def fails(worker: FakeWorker, call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
    yield Reserved(key=call.key, mode=call.mode, hit_tokens=0)
    yield Ended(key=call.key, finish=None, error_label="internal", error_message="x", retryable=True)


async def raises(worker: FakeWorker, call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
    yield Reserved(key=call.key, mode=call.mode, hit_tokens=0)
    raise RuntimeError("a fault in the worker")


@pytest.mark.parametrize("how", [skips, closes_early, fails, raises])
async def test_whatever_breaks_a_try_the_next_one_goes_on_exactly(how: Misbehaviour) -> None:
    bad, good = FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)
    bad.decode_script = lambda call: how(bad, call)
    async with fleet(bad, good) as running:
        result = await running.client.generate(PROMPT, max_tokens=8).result()
        assert result.token_ids == completion(IDS, 8)
        assert result.epochs == 2
        await check_nothing_is_left(running)


async def test_repeated_tokens_and_tokens_of_another_key_are_dropped() -> None:
    decode = FakeWorker("d", Role.DECODE)

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        stale = Key(request_id=call.key.request_id, epoch=call.key.epoch + 7)
        async for event in decode.decode(call):
            yield event
            if isinstance(event, Token):
                yield event
                yield Token(key=stale, index=event.index + 1, token_id=1)

    decode.decode_script = script
    async with fleet(decode) as running:
        result = await running.client.generate(PROMPT, max_tokens=8).result()
    assert result.token_ids == completion(IDS, 8)
    assert result.epochs == 1


async def test_after_three_failed_tries_the_client_hears_it() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.decode_script = lambda call: fails(decode, call)
    async with fleet(decode) as running:
        assert await label_of(running.client.generate(PROMPT).result()) == "internal"
        assert [call.key.epoch for call in decode.reserves] == [0, 1, 2]
        await check_nothing_is_left(running)


async def test_a_worker_dying_after_the_last_token_costs_nothing() -> None:
    decode = FakeWorker("d", Role.DECODE)

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        async for event in decode.decode(call):
            if isinstance(event, Ended):
                raise RuntimeError("died before its report")
            yield event

    decode.decode_script = script
    async with fleet(decode) as running:
        result = await running.client.generate(PROMPT, max_tokens=5).result()
    assert result.token_ids == completion(IDS, 5)
    assert result.finish_reason is FinishReason.LENGTH
    assert len(decode.reserves) == 1


async def test_an_error_of_the_request_itself_is_not_tried_again() -> None:
    decode = FakeWorker("d", Role.DECODE)

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        yield Reserved(key=call.key, mode=call.mode, hit_tokens=0)
        yield Ended(key=call.key, finish=None, error_label="invalid_request", error_message="bad grammar")

    decode.decode_script = script
    async with fleet(decode) as running:
        with pytest.raises(PdserveError, match="bad grammar") as caught:
            await running.client.generate(PROMPT).result()
        assert caught.value.label == "invalid_request"
        assert len(decode.reserves) == 1


# ---- membership --------------------------------------------------------------------------------------


async def test_a_silent_worker_gets_no_work_and_is_given_up_later() -> None:
    clock = ManualClock(50.0)
    decodes = [FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)]
    decodes[0].pause_at = decodes[1].pause_at = 1
    async with fleet(*decodes, clock=clock, suspect_after_s=1.0, heartbeat_timeout_s=1.5) as running:
        first = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=3).result())
        await decodes[0].wait_for("paused")
        clock.advance(1.2)
        await decodes[1].beat()
        status = await running.client.get_status()
        assert [w.suspect for w in status.workers] == [True, False]
        second = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=3).result())
        await decodes[1].wait_for("paused")
        assert len(decodes[0].reserves) == 1
        decodes[1].gate.set()
        clock.advance(0.5)  # the silent one is lost now: its request goes on at the other
        assert (await first).token_ids == (await second).token_ids == completion(IDS, 3)
        assert (await first).epochs == 2
        # It was only slow: it is told, registers again and is a member again.
        assert not (await decodes[0].beat()).accepted
        assert (await decodes[0].join(running.router.address)).accepted


async def test_a_new_incarnation_takes_over_the_name_and_the_old_one_is_out() -> None:
    old, new = FakeWorker("d", Role.DECODE), FakeWorker("d", Role.DECODE)
    old.pause_at = 1
    async with fleet(old) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=3).result())
        await old.wait_for("paused")
        await new.start()
        assert (await new.join(running.router.address)).accepted
        assert (await result).token_ids == completion(IDS, 3)
        assert not (await old.beat()).accepted
        answer = await old.join(running.router.address)
        assert not answer.accepted
        assert "id" in answer.problem
        await new.kill()


async def test_a_worker_that_leaves_is_gone_at_once() -> None:
    decodes = [FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)]
    async with fleet(*decodes) as running:
        await decodes[0].leave()
        status = await running.client.get_status()
        assert [w.record.peer.worker_id for w in status.workers] == ["d1"]


async def test_a_worker_of_another_model_is_refused_with_a_sentence() -> None:
    decode, other = FakeWorker("d", Role.DECODE), FakeWorker("x", Role.DECODE, model="another")
    async with fleet(decode) as running:
        await other.start()
        answer = await other.join(running.router.address)
        assert not answer.accepted
        assert "another model" in answer.problem
        await other.kill()


async def test_a_draining_worker_gets_nothing_and_is_used_again_afterwards() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode) as running:
        await decode.beat(WorkerLoad(draining=True))
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=2).result())
        await until_ready(running.router.address, ready=False)
        assert not decode.reserves
        await decode.beat(WorkerLoad(draining=False))
        assert (await result).token_ids == completion(IDS, 2)


# ---- overload and shutdown ---------------------------------------------------------------------------


async def test_a_full_queue_sheds_at_once_with_a_hint() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode, max_queue=2) as running:
        await decode.beat(WorkerLoad(draining=True))
        waiting = []
        for num_queued in (1, 2):
            stream = running.client.generate(PROMPT, max_tokens=1)
            waiting.append(asyncio.ensure_future(stream.result()))
            while (await running.client.get_status()).queued < num_queued:
                continue
        with pytest.raises(PdserveError) as caught:
            await running.client.generate(PROMPT).result()
        assert caught.value.label == "overloaded"
        assert caught.value.retry_after_s
        urgent = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=1, priority=-5).result())
        with pytest.raises(PdserveError) as caught:
            await waiting[1]
        assert caught.value.label == "overloaded"
        await decode.beat(WorkerLoad(draining=False))
        assert (await waiting[0]).token_ids == completion(IDS, 1)
        assert (await urgent).token_ids == completion(IDS, 1)


async def test_who_waits_too_long_is_shed() -> None:
    clock = ManualClock()
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode, clock=clock, max_queue_wait_s=5.0) as running:
        await decode.beat(WorkerLoad(draining=True))
        result = asyncio.ensure_future(running.client.generate(PROMPT).result())
        while not (await running.client.get_status()).queued:
            continue
        clock.advance(5.0)
        assert await label_of(result) == "overloaded"


async def test_drain_lets_streams_finish_and_refuses_new_ones() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 1
    async with fleet(decode) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=3).result())
        await decode.wait_for("paused")
        drain = asyncio.ensure_future(running.router.drain())
        await until_ready(running.router.address, ready=False)
        assert await label_of(running.client.generate(PROMPT).result()) == "draining"
        assert not drain.done()
        decode.gate.set()
        assert (await result).token_ids == completion(IDS, 3)
        await drain


async def test_drain_ends_what_does_not_finish_in_time() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 1
    async with fleet(decode, drain_timeout_s=0.05) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=3).result())
        await decode.wait_for("paused")
        await running.router.drain()
        assert await label_of(result) == "draining"
        await decode.wait_for("cancel_decode")


async def test_closing_a_lost_workers_link_does_not_touch_the_link_of_its_return() -> None:
    clock = ManualClock(50.0)
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode, clock=clock, suspect_after_s=1.0, heartbeat_timeout_s=1.5) as running:
        for _ in range(5):
            clock.advance(2.0)
            running.router.hub.roster.tick()  # lost: its link is being closed while it comes back
            assert not running.router.hub.roster.members()
            assert (await decode.join(running.router.address)).accepted
            result = await running.client.generate(PROMPT, max_tokens=3).result()
            assert (result.token_ids, result.epochs) == (completion(IDS, 3), 1)


async def test_a_tick_that_fails_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(50.0)
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode, clock=clock, max_queue_wait_s=5.0) as running:
        roster, failed = running.router.hub.roster, asyncio.Event()
        tick = roster.tick

        def fails_once() -> None:
            monkeypatch.setattr(roster, "tick", tick)
            failed.set()
            raise RuntimeError("a fault in a tick")

        monkeypatch.setattr(roster, "tick", fails_once)
        await decode.beat(WorkerLoad(draining=True))
        result = asyncio.ensure_future(running.client.generate(PROMPT).result())
        await failed.wait()
        clock.advance(5.0)
        assert await label_of(result) == "overloaded", "shed by a later tick"
