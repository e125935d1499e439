"""The SDK, asyncio and blocking, against a router with scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.api import Admitted, Chunk
from pdserve.client import AsyncClient, ChatMessage, Client, Result
from pdserve.client.result import Collector
from pdserve.errors import InternalError, InvalidRequest, PdserveError, Unavailable
from pdserve.messages import Outcome
from pdserve.types import FinishReason, Role
from tests.support.byte_model import completion, text_of
from tests.support.router_kit import FakeWorker, fleet


async def in_thread(address: str, work: Callable[[Client], Any]) -> Any:
    def run() -> Any:
        with Client(address) as client:
            return work(client)

    return await asyncio.to_thread(run)


def check(result: Result) -> None:
    assert result.text == text_of("once upon", 6)
    assert result.token_ids == completion(tuple(b"once upon"), 6)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.client_request_id == "mine"
    assert result.request_id
    assert result.usage.completion_tokens == 6
    assert 0 <= result.timings.queue_s <= result.timings.ttft_s <= result.timings.total_s


async def test_both_clients_stream_and_give_the_whole_result() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode) as running:
        stream = running.client.generate("once upon", max_tokens=6, client_request_id="mine")
        text = "".join([chunk.text async for chunk in stream])
        check(await stream.result())
        assert text == text_of("once upon", 6)

        def blocking(client: Client) -> None:
            stream = client.generate("once upon", max_tokens=6, client_request_id="mine")
            assert "".join(chunk.text for chunk in stream) == text
            check(stream.result())
            assert client.get_model().model == "bytes"
            assert len(client.get_status().workers) == 1

        await in_thread(running.router.address, blocking)
    assert {call.deadline_s > 500 for call in decode.reserves} == {True}  # a deadline without asking for one


async def test_options_reach_the_worker() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode) as running:
        await running.client.generate(
            messages=[ChatMessage(role="user", content="hi"), {"role": "assistant", "content": "yes"}],
            temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=11, max_tokens=2, stop_token_ids=[4],
            ignore_eos=True, deadline_s=9.0, priority=2, no_prefix_cache=True, trace_id="ab" * 16,
        ).result()  # fmt: skip
    call = decode.reserves[0]
    assert bytes(call.token_ids) == b"user: hi\nassistant: yes\n"
    params = call.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.5, 0.25)
    assert (params.seed, params.max_tokens, params.stop_token_ids, params.ignore_eos) == (11, 2, (4,), True)
    assert (call.priority, call.use_prefix_cache, call.trace_id) == (2, False, "ab" * 16)
    assert 8 < call.deadline_s <= 9


async def test_cancel_from_the_blocking_client() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 2
    async with fleet(decode) as running:

        def blocking(client: Client) -> str:
            stream = client.generate("abc", max_tokens=9)
            next(iter(stream))
            stream.cancel()
            with pytest.raises(PdserveError) as caught:
                stream.result()
            return caught.value.label

        assert await in_thread(running.router.address, blocking) == "cancelled"
        await decode.wait_for("cancel_decode")


async def test_leaving_a_stream_early_cancels_it() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 2
    async with fleet(decode) as running:
        async with running.client.generate("abc", max_tokens=9) as stream:
            async for _ in stream:
                break
        await decode.wait_for("cancel_decode")

        def blocking(client: Client) -> None:
            with client.generate("abc", max_tokens=9) as stream:
                next(iter(stream))

        await in_thread(running.router.address, blocking)
        await decode.wait_for("cancel_decode")


async def test_abort_from_the_blocking_client() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 1
    async with fleet(decode) as running:

        def blocking(client: Client) -> None:
            stream = client.generate("abc", max_tokens=9)
            next(iter(stream))
            assert stream.request_id
            assert client.abort(stream.request_id) is Outcome.STOPPING
            with pytest.raises(PdserveError, match="aborted"):
                stream.result()

        await in_thread(running.router.address, blocking)


async def test_errors_are_typed_and_carry_their_fields() -> None:
    async with fleet(FakeWorker("d", Role.DECODE)) as running:

        def blocking(client: Client) -> InvalidRequest:
            with pytest.raises(InvalidRequest) as caught:
                client.generate("x", top_p=2.0).result()
            return caught.value

        for error in (
            await in_thread(running.router.address, blocking),
            (await asyncio.gather(running.client.generate("x", top_p=2.0).result(), return_exceptions=True))[
                0
            ],
        ):
            assert isinstance(error, InvalidRequest)
            assert [v.field for v in error.violations] == ["sampling.top_p"]


BAD_CALLS: list[dict[str, Any]] = [
    {},
    {"prompt": "x", "token_ids": [1]},
    {"token_ids": [-1]},
    {"token_ids": ["a"]},
    {"prompt": 5},
    {"prompt": "x", "top_k": -1},
    {"prompt": "x", "seed": -1},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x", "tool": "y"}]},
]


@pytest.mark.parametrize("ask", BAD_CALLS)
async def test_what_no_message_can_carry_is_refused_before_it_is_sent(ask: dict[str, Any]) -> None:
    client = AsyncClient("127.0.0.1:1")
    with pytest.raises(InvalidRequest):
        client.generate(**ask)
    await client.close()
    with Client("127.0.0.1:1") as blocking, pytest.raises(InvalidRequest):
        blocking.generate(**ask)


async def test_nobody_there_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate("x").result()
        assert "127.0.0.1" not in caught.value.message
        with pytest.raises(Unavailable):
            await client.get_status()
    with Client("127.0.0.1:1") as blocking:
        with pytest.raises(Unavailable):
            blocking.generate("x").result()
        with pytest.raises(Unavailable):
            blocking.get_model()
    with pytest.raises(Unavailable, match="closed"):
        blocking.get_model()


def test_a_stream_with_a_gap_or_without_an_end_is_an_error() -> None:
    collector = Collector()
    collector.take(Admitted(request_id="r", client_request_id="", prompt_tokens=1))
    collector.take(Chunk(index=0, token_ids=(1, 2), text=""))
    with pytest.raises(InternalError):
        collector.take(Chunk(index=3, token_ids=(4,), text=""))
    with pytest.raises(InternalError):
        collector.result()
