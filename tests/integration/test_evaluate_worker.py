"""Evaluate on one worker over real gRPC: cancelled, draining, refused; no page is left behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.config.worker import WorkerConfig
from pdserve.messages import Evaluate, EvaluateParams
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, evaluate_pb2, evaluate_pb2_grpc
from pdserve.types import Pooling, Role
from pdserve.worker.host import WorkerHost
from tests.support import tiny_models

LIMIT_S = 60.0
LENGTH = 480


@dataclass(frozen=True, kw_only=True)
class Running:
    """A worker and stubs of its services."""

    incarnation: int
    evaluator: Any
    worker: Any

    def call(self, seed: int = 0, length: int = LENGTH, incarnation: int | None = None) -> Any:
        """One call, begun."""
        ids = tuple((seed * 7 + 3 * i) % tiny_models.VOCAB for i in range(length))
        ask = Evaluate(
            receiver_incarnation=incarnation or self.incarnation, token_ids=ids, tenant="t",
            params=EvaluateParams(num_top=1) if seed % 2 else EvaluateParams(pooling=Pooling.MEAN),
        )  # fmt: skip
        return self.evaluator.Evaluate(convert.evaluate_to_pb(ask), timeout=LIMIT_S)

    async def until_idle(self) -> None:
        """Waits until nothing lives and every page is free or evictable."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                answer = await self.worker.GetWorkerStatus(cluster_pb2.GetWorkerStatusRequest())
                state = convert.worker_state_from_pb(answer)
                assert not state.integrity_problem
                if state.idle and state.live == 0:
                    return


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    tiny_models.save(tiny_models.qwen3(), folder)
    secret = secrets.token_bytes(32)
    config = WorkerConfig(
        worker_id="w", role=Role.DECODE, model=str(folder), fleet_secret=secret.hex(), dtype="float32",
        deterministic=True, num_pages=96, prefill_chunk_tokens=16, token_budget=32, threads=2,
    )  # fmt: skip
    host = WorkerHost(config)
    record = await asyncio.to_thread(host.start)
    channel = open_channel(record.peer.control)
    try:
        yield Running(
            incarnation=record.peer.incarnation,
            evaluator=authenticated(evaluate_pb2_grpc.EvaluateServiceStub(channel), secret),
            worker=authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), secret),
        )
    finally:
        await channel.close(None)
        await asyncio.to_thread(host.stop)


async def label_of(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_from_rpc(caught.value).label


async def test_cancelled_calls_leave_nothing_and_the_others_are_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as worker:
        calls = [worker.call(seed) for seed in range(12)]
        await asyncio.wait([asyncio.ensure_future(_answer(call)) for call in calls[:2]])
        for call in calls[2:10]:
            call.cancel()
        last = [await call for call in calls[10:]]
        assert [len(answer.vector) > 0 for answer in last] == [True, False]
        assert [len(answer.logprobs) for answer in last] == [0, LENGTH - 1]
        await worker.until_idle()
        again = await worker.call(11)
        assert again.logprobs == last[1].logprobs


async def test_a_draining_worker_takes_no_more_and_finishes_what_it_has(tmp_path: Path) -> None:
    async with running(tmp_path) as worker:
        assert await label_of(worker.call(incarnation=worker.incarnation + 1)) == "stale_incarnation"
        assert await label_of(worker.call(length=tiny_models.VOCAB * 4)) == "prompt_too_long"
        assert await label_of(worker.evaluator.Evaluate(evaluate_pb2.EvaluateRequest())) == "invalid_request"
        live = [worker.call(seed) for seed in range(3)]
        first = await live[0]
        drained = asyncio.ensure_future(
            worker.worker.Drain(cluster_pb2.DrainRequest(timeout_s=LIMIT_S), timeout=LIMIT_S)
        )
        assert await label_of(_until_refused(worker)) == "draining"
        assert len(first.vector) == len((await live[2]).vector)
        assert len((await live[1]).logprobs) == LENGTH - 1
        assert (await drained).drained
        await worker.until_idle()


async def _answer(call: Any) -> Any:
    return await call


async def _until_refused(worker: Running) -> None:
    """Asks until the drain has come there."""
    while True:
        await worker.call(length=2)
