"""The router's services against scripted workers over real gRPC: the happy path and what clients may ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvtransfer.ticket import Side, request_hash, verify
from pdserve.errors import PdserveError
from pdserve.messages import Outcome, Reserve, Reserved
from pdserve.rpc import convert
from pdserve.types import FinishReason, HandoverMode, Role
from tests.support.byte_model import CONTEXT, END_ID, VOCAB, completion, text_of
from tests.support.router_kit import SECRET, FakeWorker, fleet, never


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)


async def test_a_request_goes_to_both_workers_with_one_ticket() -> None:
    prefill, decode = pair()
    async with fleet(prefill, decode) as running:
        result = await running.client.generate("hello there", max_tokens=8, seed=7).result()
    assert result.token_ids == completion(tuple(b"hello there"), 8)
    assert result.text == text_of("hello there", 8)
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (11, 8)
    assert (result.ledger.prefill_worker, result.ledger.decode_worker) == ("p", "d")
    assert result.epochs == 1
    reserve, call = decode.reserves[0], prefill.prefills[0]
    assert (reserve.key, reserve.ticket) == (call.key, call.ticket)
    assert reserve.mode is HandoverMode.DISAGGREGATED
    assert (reserve.prefill, call.decode) == (prefill.record.peer, decode.record.peer)
    assert call.sampling.seed == 7
    for side, worker in ((Side.PREFILL, prefill), (Side.DECODE, decode)):
        facts = verify(
            SECRET, call.ticket, now=1000.0, side=side, key=call.key, incarnation=worker.incarnation,
            emitter="d", request_hash=request_hash(call.token_ids, call.sampling),
        )  # fmt: skip
        # Expiry is on the worker's own clock, which these workers say is at 1000 s.
        assert 1500 < facts.expires(side) < 1650


async def test_prefill_is_sent_without_waiting_for_reserved() -> None:
    prefill, decode = pair()
    both = asyncio.Event()

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        async with asyncio.timeout(5):
            await both.wait()
        async for event in decode.decode(call):
            yield event

    decode.decode_script = script
    async with fleet(prefill, decode) as running:
        stream = running.client.generate("x", max_tokens=2)
        waiting = asyncio.ensure_future(stream.result())
        await prefill.wait_for("prefill")
        both.set()
        assert len((await waiting).token_ids) == 2


@pytest.mark.parametrize(
    ("ask", "prompt"),
    [
        ({"prompt": "plain"}, b"plain"),
        ({"prompt": "long " * 3000}, b""),
        ({"messages": [{"role": "user", "content": "hi <|end|>"}]}, b"user: hi <|end|>\n"),
        ({"token_ids": [1, 2, 257]}, bytes([1, 2])),
    ],
)
async def test_every_kind_of_input_becomes_token_ids(ask: dict[str, object], prompt: bytes) -> None:
    _, decode = pair()
    async with fleet(decode) as running:
        if not prompt:  # longer than the context: tokenised off the loop, then refused
            with pytest.raises(PdserveError, match="context") as caught:
                await running.client.generate(**ask).result()  # type: ignore[arg-type]
            assert caught.value.label == "prompt_too_long"
            return
        result = await running.client.generate(max_tokens=3, **ask).result()  # type: ignore[arg-type]
    ids = decode.reserves[0].token_ids
    assert ids == ((1, 2, 257) if "token_ids" in ask else tuple(prompt))
    assert result.usage.prompt_tokens == len(ids)


async def test_chunks_carry_indices_and_tokens_that_came_together_travel_together() -> None:
    _, decode = pair()
    async with fleet(decode) as running:
        chunks = [chunk async for chunk in running.client.generate("abc", max_tokens=200)]
    ids = [i for chunk in chunks for i in chunk.token_ids]
    assert tuple(ids) == completion(tuple(b"abc"), 200)
    expected = 0
    for chunk in chunks:
        assert chunk.index == expected
        expected += len(chunk.token_ids)
    assert "".join(chunk.text for chunk in chunks) == text_of("abc", 200)


async def test_no_text_gives_ids_only() -> None:
    _, decode = pair()
    async with fleet(decode) as running:
        result = await running.client.generate("abc", max_tokens=5, no_text=True).result()
    assert (result.text, result.token_ids) == ("", completion(tuple(b"abc"), 5))


async def test_an_end_token_stops_with_its_reason() -> None:
    _, decode = pair()
    decode.ends_at = 3
    async with fleet(decode) as running:
        result = await running.client.generate("abc", max_tokens=50).result()
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == (*completion(tuple(b"abc"), 3), END_ID)
    assert result.text == text_of("abc", 3)


async def test_a_stop_text_ends_the_stream_and_cancels_decode() -> None:
    prefill, decode = pair()
    decode.pause_at = 40  # it would go on; the router must stop it
    whole = text_of("tell me", 40)
    stop = whole[10:13]
    async with fleet(prefill, decode) as running:
        result = await running.client.generate("tell me", max_tokens=400, stop=[stop, "§§"]).result()
        assert await decode.wait_for("cancel_decode") == decode.reserves[0].key
        status = await running.client.get_status()
    assert result.finish_reason is FinishReason.STOP
    assert result.text == whole[: whole.index(stop)]
    assert len(result.token_ids) == whole.index(stop) + 3
    assert result.ledger.decode_worker == "d"  # the worker's report was waited for
    assert (status.running, status.queued) == (0, 0)
    assert all(worker.outstanding_tokens == 0 for worker in status.workers)


async def test_text_held_back_for_a_stop_text_comes_at_the_end() -> None:
    _, decode = pair()
    whole = text_of("abc", 6)
    async with fleet(decode) as running:
        result = await running.client.generate("abc", max_tokens=6, stop=[whole[-2:] + "!"]).result()
    assert result.text == whole
    assert result.finish_reason is FinishReason.LENGTH


async def test_the_seed_is_drawn_once_and_differs_between_requests() -> None:
    prefill, decode = pair()
    async with fleet(prefill, decode) as running:
        for _ in range(3):
            await running.client.generate("x", max_tokens=1).result()
    seeds = [call.sampling.seed for call in decode.reserves]
    assert len(set(seeds)) == 3
    assert seeds == [call.sampling.seed for call in prefill.prefills]


# ---- where requests go -------------------------------------------------------------------------------


async def test_without_a_prefill_worker_decode_computes_the_prompt() -> None:
    _, decode = pair()
    async with fleet(decode) as running:
        result = await running.client.generate("abc", max_tokens=2).result()
    assert decode.reserves[0].mode is HandoverMode.LOCAL
    assert decode.reserves[0].prefill is None
    assert result.ledger.decode_computed_prompt_tokens == 3


async def test_an_aggregated_worker_serves_alone() -> None:
    worker = FakeWorker("a", Role.AGGREGATED)
    async with fleet(worker) as running:
        await running.client.generate("abc", max_tokens=2).result()
    assert worker.reserves[0].mode is HandoverMode.LOCAL


async def test_short_prompts_stay_on_decode_below_the_threshold() -> None:
    prefill, decode = pair()
    async with fleet(prefill, decode, local_prefill_threshold=10) as running:
        await running.client.generate("x" * 9, max_tokens=1).result()
        assert not prefill.prefills
        await running.client.generate("x" * 10, max_tokens=1).result()
    assert len(prefill.prefills) == 1


async def test_when_decode_chooses_to_prefill_itself_the_prefill_worker_is_told() -> None:
    prefill, decode = pair()
    prefill.prefill_script = never

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        async for event in decode.decode(call):
            if isinstance(event, Reserved):
                event = Reserved(key=call.key, mode=HandoverMode.LOCAL, hit_tokens=0)
            yield event

    decode.decode_script = script
    async with fleet(prefill, decode) as running:
        result = await running.client.generate("abc", max_tokens=4).result()
        assert await prefill.wait_for("cancel_prefill") == decode.reserves[0].key
    assert result.token_ids == completion(tuple(b"abc"), 4)
    assert result.epochs == 1


async def test_workers_that_do_not_fit_are_not_paired_and_status_says_why() -> None:
    prefill, decode = FakeWorker("p", Role.PREFILL, layout="other"), FakeWorker("d", Role.DECODE)
    async with fleet(prefill, decode) as running:
        await running.client.generate("abc", max_tokens=1).result()
        status = await running.client.get_status()
    assert not prefill.prefills
    assert len(status.pairing_problems) == 1
    assert "page layout" in status.pairing_problems[0]


async def hold_prefills(workers: list[FakeWorker], total: int) -> None:
    """Waits until the workers together have seen `total` prefills."""
    async with asyncio.timeout(10):
        getters = {asyncio.ensure_future(w.wait_for("prefill")): w for w in workers}
        while sum(len(w.prefills) for w in workers) < total:
            done, _ = await asyncio.wait(getters, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                worker = getters.pop(task)
                getters[asyncio.ensure_future(worker.wait_for("prefill"))] = worker
        for task in getters:
            task.cancel()


async def test_eight_requests_on_two_idle_prefill_workers_go_four_and_four() -> None:
    prefills = [FakeWorker("p0", Role.PREFILL), FakeWorker("p1", Role.PREFILL)]
    decodes = [FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)]
    for prefill in prefills:
        prefill.prefill_script = never  # a prompt that is done at once would make its worker the idler one
    for decode in decodes:
        decode.pause_at = 0
    async with fleet(*prefills, *decodes) as running:
        streams = [running.client.generate(f"prompt number {n}", max_tokens=4) for n in range(8)]
        results = [asyncio.ensure_future(stream.result()) for stream in streams]
        await hold_prefills(prefills, 8)
        assert [len(p.prefills) for p in prefills] == [4, 4]
        for decode in decodes:
            decode.gate.set()
        await asyncio.gather(*results)
    assert [len(d.reserves) for d in decodes] == [4, 4]


async def test_short_prompts_avoid_the_worker_with_a_long_one() -> None:
    prefills = [FakeWorker("p0", Role.PREFILL), FakeWorker("p1", Role.PREFILL)]
    decode = FakeWorker("d", Role.DECODE)
    for prefill in prefills:
        prefill.prefill_script = never
    decode.pause_at = 0
    async with fleet(*prefills, decode) as running:
        long = running.client.generate(token_ids=[65] * 3000, max_tokens=4)
        waiting = [asyncio.ensure_future(long.result())]
        await hold_prefills(prefills, 1)
        busy, idle = sorted(prefills, key=lambda p: -len(p.prefills))
        streams = [running.client.generate("short prompt", max_tokens=4) for _ in range(8)]
        waiting += [asyncio.ensure_future(stream.result()) for stream in streams]
        await hold_prefills(prefills, 9)
        decode.gate.set()
        await asyncio.gather(*waiting)
    assert len(idle.prefills) >= 7
    assert len(busy.prefills) + len(idle.prefills) == 9


async def test_sixty_four_streams_at_once_are_all_right() -> None:
    prefills = [FakeWorker("p0", Role.PREFILL), FakeWorker("p1", Role.PREFILL)]
    decodes = [FakeWorker("d0", Role.DECODE), FakeWorker("d1", Role.DECODE)]
    async with fleet(*prefills, *decodes) as running:
        prompts = [f"stream {n}" for n in range(64)]
        results = await asyncio.gather(
            *(running.client.generate(prompt, max_tokens=24).result() for prompt in prompts)
        )
        status = await running.client.get_status()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == completion(tuple(prompt.encode()), 24)
    assert all(worker.outstanding_tokens == 0 for worker in status.workers)


# ---- questions ---------------------------------------------------------------------------------------


async def test_model_and_status() -> None:
    prefill, decode = pair()
    async with fleet(prefill, decode) as running:
        model = await running.client.get_model()
        assert (model.model, model.limits.vocab_size, model.limits.max_context) == ("bytes", VOCAB, CONTEXT)
        assert model.has_chat_template
        assert await running.client.get_model("bytes") == model
        with pytest.raises(PdserveError) as caught:
            await running.client.get_model("other")
        assert caught.value.label == "unknown_model"
        status = await running.client.get_status()
    assert {w.record.peer.worker_id for w in status.workers} == {"p", "d"}
    assert {w.record.peer.incarnation for w in status.workers} == {prefill.incarnation, decode.incarnation}
    assert not any(w.suspect for w in status.workers)


async def test_abort_by_id_from_another_call() -> None:
    prefill, decode = pair()
    decode.pause_at = 2
    async with fleet(prefill, decode) as running:
        stream = running.client.generate("abc", max_tokens=9)
        events = aiter(stream)
        await anext(events)
        assert stream.request_id is not None
        assert await running.client.abort(stream.request_id) is Outcome.STOPPING
        with pytest.raises(PdserveError) as caught:
            await stream.result()
        assert caught.value.label == "cancelled"
        await decode.wait_for("cancel_decode")
        assert await running.client.abort(stream.request_id) is Outcome.COMPLETE
        assert await running.client.abort("never heard of") is Outcome.UNKNOWN


async def test_before_any_worker_the_answer_is_unavailable_with_a_hint() -> None:
    async with fleet() as running:
        for ask in (
            lambda: running.client.generate("abc").result(),
            running.client.get_model,
        ):
            with pytest.raises(PdserveError) as caught:
                await ask()
            assert caught.value.label == "unavailable"
            assert caught.value.retry_after_s


BAD: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": ""}, "invalid_request", "prompt"),
    ({"token_ids": []}, "invalid_request", "tokens"),
    ({"token_ids": [5, VOCAB]}, "invalid_request", "tokens"),
    ({"messages": []}, "invalid_request", "chat.messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_request", "chat.messages.role"),
    ({"prompt": "x", "temperature": -1.0}, "invalid_request", "sampling.temperature"),
    ({"prompt": "x", "temperature": float("nan")}, "invalid_request", "sampling.temperature"),
    ({"prompt": "x", "temperature": 1e30}, "invalid_request", "sampling.temperature"),
    ({"prompt": "x", "top_p": 0.0}, "invalid_request", "sampling.top_p"),
    ({"prompt": "x", "top_k": 2**31}, "invalid_request", "sampling.top_k"),
    ({"prompt": "x", "min_p": 1.0}, "invalid_request", "sampling.min_p"),
    ({"prompt": "x", "max_tokens": 0}, "invalid_request", "sampling.max_tokens"),
    ({"prompt": "x", "model": "other"}, "unknown_model", ""),
    ({"prompt": "x", "stop": ["s"] * 17}, "invalid_request", "stop"),
    ({"prompt": "x", "deadline_s": 601.0}, "invalid_request", "deadline_s"),
    ({"prompt": "x", "priority": 101}, "invalid_request", "priority"),
    ({"token_ids": [1] * CONTEXT}, "prompt_too_long", ""),
]


async def test_bad_requests_get_their_typed_error_and_harm_nothing() -> None:
    prefill, decode = pair()
    async with fleet(prefill, decode) as running:
        for ask, label, field in BAD:
            with pytest.raises(PdserveError) as caught:
                await running.client.generate(**ask).result()  # type: ignore[arg-type]
            assert caught.value.label == label, ask
            assert [v.field for v in caught.value.violations] == ([field] if field else []), ask
        assert not decode.reserves
        result = await running.client.generate("still fine", max_tokens=4).result()
    assert result.token_ids == completion(tuple(b"still fine"), 4)


async def test_what_no_pool_can_hold_is_refused_at_the_edge() -> None:
    decode = FakeWorker("d", Role.DECODE, pool_pages=4)
    async with fleet(decode) as running:
        with pytest.raises(PdserveError) as caught:
            await running.client.generate(token_ids=[1] * 60, max_tokens=10).result()
        assert caught.value.label == "never_fits"
        await running.client.generate(token_ids=[1] * 60, max_tokens=4).result()
        await running.client.generate(token_ids=[1] * 60).result()
    assert [call.sampling.max_tokens for call in decode.reserves] == [4, 4]
