"""Embed through a router whose workers are scripted: lost, draining and full ones, cancels, drains, load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdserve.api import Embeddings, EmbedInput
from pdserve.errors import Cancelled, Draining, InternalError, Overloaded, PdserveError, Unavailable
from pdserve.messages import Evaluate, Evaluated, Outcome
from pdserve.rpc import convert
from pdserve.rpc.v1 import evaluate_pb2, evaluate_pb2_grpc
from pdserve.types import Role
from router import texts
from router.caller import Caller
from tests.support.router_kit import FakeWorker, Fleet, fleet

Script = Callable[[Evaluate], Awaitable[Evaluated]]
LIMIT_S = 20.0


class TextWorker(FakeWorker, evaluate_pb2_grpc.EvaluateServiceServicer):
    """Answers with its own number as the vector, or by a script. calls: what it was asked."""

    def __init__(self, worker_id: str, role: Role, number: float) -> None:
        super().__init__(worker_id, role)
        self.number = number
        self.calls: list[Evaluate] = []
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()
        self.script: Script = self.answer

    async def start(self) -> None:
        evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(self, self._server.server)
        await super().start()

    async def answer(self, call: Evaluate) -> Evaluated:
        return Evaluated(vector=(self.number,), cached_tokens=1)

    def raises(self, error: PdserveError) -> None:
        async def script(call: Evaluate) -> Evaluated:
            raise error

        self.script = script

    def waits(self) -> asyncio.Event:
        """From now on its answers wait for this event."""
        gate = asyncio.Event()

        async def script(call: Evaluate) -> Evaluated:
            await gate.wait()
            return await self.answer(call)

        self.script = script
        return gate

    async def Evaluate(  # noqa: N802
        self, request: evaluate_pb2.EvaluateRequest, context: Any
    ) -> evaluate_pb2.EvaluateResponse:
        call = convert.evaluate_from_pb(request)
        assert call.receiver_incarnation == self.incarnation
        self.calls.append(call)
        self.asked.set()
        try:
            return convert.evaluated_to_pb(await self.script(call))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def workers() -> tuple[TextWorker, TextWorker]:
    return TextWorker("p", Role.PREFILL, 1.0), TextWorker("d", Role.DECODE, 2.0)


async def embed(running: Fleet, *inputs: tuple[int, ...], tenant: str = "shop") -> Embeddings:
    async with asyncio.timeout(LIMIT_S):
        source = EmbedInput(inputs=inputs or ((1, 2, 3),), no_normalise=True)
        return await texts.embed(running.router.hub, source, caller=Caller(tenant=tenant))


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(LIMIT_S):
        await event.wait()


async def test_the_prefill_worker_is_asked_for_the_caller_s_tenant() -> None:
    prefill, decode = workers()
    async with fleet(prefill, decode) as running:
        found = await embed(running, (1, 2, 3), (4, 5))
        assert found.vectors == ((1.0,), (1.0,))
        assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (5, 2)
        assert {call.token_ids for call in prefill.calls} == {(1, 2, 3), (4, 5)}
        assert {(call.tenant, call.cache_salt, call.priority) for call in prefill.calls} == {("shop", "", 0)}
        assert not decode.calls


@pytest.mark.parametrize("error", [Draining("x"), Overloaded("x"), Unavailable("x")])
async def test_what_one_worker_does_not_take_another_does(error: PdserveError) -> None:
    prefill, decode = workers()
    prefill.raises(error)
    async with fleet(prefill, decode) as running:
        assert (await embed(running)).vectors == ((2.0,),)
        assert [len(prefill.calls), len(decode.calls)] == [1, 1]


async def test_a_worker_that_dies_under_a_call_costs_one_more() -> None:
    prefill, decode = workers()
    prefill.waits()
    async with fleet(prefill, decode) as running:
        asking = asyncio.ensure_future(embed(running))
        await until(prefill.asked)
        await prefill.kill()
        assert (await asking).vectors == ((2.0,),)


async def test_what_says_something_of_the_text_is_not_tried_again() -> None:
    prefill, decode = workers()
    prefill.raises(InternalError("it broke"))
    async with fleet(prefill, decode) as running:
        with pytest.raises(InternalError, match="it broke"):
            await embed(running)
        assert not decode.calls


async def test_when_all_fail_the_last_refusal_is_told_and_load_is_released() -> None:
    prefill, decode = workers()
    prefill.raises(Draining("x"))
    decode.raises(Overloaded("full", retry_after_s=3.0))
    async with fleet(prefill, decode) as running:
        with pytest.raises(Overloaded, match="full") as caught:
            await embed(running)
        assert caught.value.retry_after_s == 3.0
        status = running.router.hub.status()
        assert [worker.outstanding_tokens for worker in status.workers] == [0, 0]


async def test_a_cancel_reaches_the_worker_and_load_is_counted_meanwhile() -> None:
    prefill, decode = workers()
    prefill.waits()
    async with fleet(prefill, decode) as running:
        asking = asyncio.ensure_future(embed(running, (7,) * 30))
        await until(prefill.asked)
        status = running.router.hub.status()
        loads = {worker.record.peer.worker_id: worker.outstanding_tokens for worker in status.workers}
        assert loads["p"] >= 30
        assert (loads["d"], status.running) == (0, 1)
        asking.cancel()
        await until(prefill.cancelled)
        assert running.router.hub.status().running == 0


async def test_an_abort_ends_a_request_whose_prompt_is_being_computed() -> None:
    prefill, decode = workers()
    prefill.waits()
    async with fleet(prefill, decode) as running, asyncio.timeout(LIMIT_S):
        stream = running.client.generate(token_ids=(7,) * 30, prompt_logprobs=0, max_tokens=2)
        asking = asyncio.ensure_future(stream.result())
        await prefill.asked.wait()
        (name,) = running.router.hub._jobs
        assert running.router.hub.abort(name) is Outcome.STOPPING
        with pytest.raises(Cancelled):
            await asking
        await prefill.cancelled.wait()
        assert running.router.hub.status().running == 0


async def test_a_draining_router_takes_no_more_and_waits_for_what_it_has() -> None:
    prefill, decode = workers()
    gate = prefill.waits()
    async with fleet(prefill, decode) as running:
        asking = asyncio.ensure_future(embed(running))
        await until(prefill.asked)
        begun = asyncio.Event()
        running.router.hub.on_ready = lambda ready: None if ready else begun.set()
        draining = asyncio.ensure_future(running.router.drain())
        await until(begun)
        with pytest.raises(Draining):
            await embed(running)
        gate.set()
        assert (await asking).vectors == ((1.0,),)
        await draining
