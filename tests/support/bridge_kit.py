"""Workers of different layouts, each a process of its own, that a test pairs many ways.

What lives here: starting them and asking a pair for tokens as a router does. What does not: what must come
out (tests).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from pdserve.api import ExpertReport
from pdserve.config.worker import WorkerConfig
from pdserve.messages import Ended
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.types import PeerRef, Role, SamplingParams
from tests.support import direct as dx
from tests.support.processes import WorkerProcess

POOL_ROWS = 1920
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a worker's pages are cut."""

    tp: int
    page_size: int

    def __str__(self) -> str:
        return f"tp{self.tp}x{self.page_size}"


def config(role: Role, cut: Cut, model: str, secret: bytes, **settings: Any) -> WorkerConfig:
    """A small deterministic worker of that cut."""
    return WorkerConfig(
        worker_id=f"{role}-{cut}-{secrets.token_hex(2)}", role=role, model=model, fleet_secret=secret.hex(),
        dtype="float32", deterministic=True, num_pages=POOL_ROWS // cut.page_size, prefill_chunk_tokens=64,
        token_budget=128, threads=1, tp=cut.tp, page_size=cut.page_size, decode_pace_s=0.0, lease_s=60.0,
        **settings,
    )  # fmt: skip


@dataclass(kw_only=True)
class Pair:
    """One prefill and one decode worker; what `direct.Ask` needs of a fleet."""

    secret: bytes
    prefill: WorkerProcess
    decode: WorkerProcess
    transport: str

    @property
    def name(self) -> str:
        """Which two, and by what way; a tenant of its own, so that no pair finds another's pages."""
        return f"{self.p.worker_id}-{self.d.worker_id}-{self.transport}"

    @property
    def p(self) -> PeerRef:
        """The prefill worker, reachable by the one transport."""
        peer = self.prefill.peer
        return replace(peer, shm="") if self.transport == "tcp" else replace(peer, tcp="")

    @property
    def d(self) -> PeerRef:
        return self.decode.peer

    def ask(self, tokens: tuple[int, ...], num_new: int) -> dx.Ask:
        """A request to this pair."""
        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
        return dx.Direct.ask(
            cast("dx.Direct", self), tokens, sampling=sampling, deadline_s=LIMIT_S, tenant=self.name
        )

    async def generate(self, prompts: list[tuple[int, ...]], num_new: int) -> list[tuple[list[int], Ended]]:
        """All prompts at once."""
        return list(await asyncio.gather(*(dx.generate(self.ask(tokens, num_new)) for tokens in prompts)))

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Both are reached, however long that takes on a machine that is busy with starting workers; calls
        made meanwhile use these connections."""
        async with AsyncExitStack() as stack:
            for peer in (self.p, self.d):
                channel = await stack.enter_async_context(open_channel(peer.control))
                await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
            yield

    async def until_idle(self) -> None:
        """Both pools have nothing left that is held, and their books add up."""
        for peer in (self.p, self.d):
            await dx.until(
                cast("dx.Direct", self),
                peer,
                lambda state: state.idle and not state.integrity_problem,
                LIMIT_S,
            )


async def experts_of(peer: PeerRef, secret: bytes) -> ExpertReport:
    """Where a worker's experts lie, and what they have had to do, as it tells a router."""
    async with open_channel(peer.control) as channel:
        stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), secret)
        answer = await stub.GetWorkerExperts(cluster_pb2.GetWorkerExpertsRequest(), timeout=LIMIT_S)
    return convert.expert_report_from_pb(answer.report)
