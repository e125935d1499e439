"""A worker joins every router behind a name, and follows the name: real streams, a resolver of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.types import CapabilityRecord, ModelLimits, PeerRef, Role, WorkerLoad, WorkerRecord
from pdserve.worker import membership
from pdserve.worker.membership import Membership, addresses_of

RECORD = WorkerRecord(
    peer=PeerRef(worker_id="decode-0", incarnation=7, control="127.0.0.1:1"),
    role=Role.DECODE,
    capability=CapabilityRecord(
        layout="", numerics="", model="", tokenizer="", dtype="", page_size=1, page_bytes=1, transports=()
    ),
    limits=ModelLimits(vocab_size=1, max_context=1, end_token_ids=(), bos_token_id=None),
    model_name="standin", pool_pages=1, page_size=1, pid=1,
)  # fmt: skip
LIMIT_S = 10.0


class Router(cluster_pb2_grpc.ClusterServiceServicer):
    """Takes whoever joins."""

    def __init__(self) -> None:
        self.server = grpc.aio.server()
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.changed = asyncio.Condition()
        self.members = 0
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, self.server)

    async def Join(self, requests: Any, context: Any) -> AsyncIterator[cluster_pb2.JoinResponse]:  # noqa: N802
        await self._count(1)
        try:
            async for _ in requests:
                yield cluster_pb2.JoinResponse(accepted=True)
        finally:
            await self._count(-1)

    async def _count(self, more: int) -> None:
        async with self.changed:
            self.members += more
            self.changed.notify_all()

    async def until(self, members: int) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: self.members == members), LIMIT_S)


class Name:
    """What the name server says, and whether it was asked since that changed."""

    def __init__(self) -> None:
        self.addresses: frozenset[str] = frozenset()
        self.asked = asyncio.Event()

    async def __call__(self, name: str) -> frozenset[str]:
        assert name == "routers.svc:50051"
        self.asked.set()
        return self.addresses

    async def say(self, *routers: Router) -> None:
        """Returns once it was asked twice: then the first answer has been acted on."""
        self.addresses = frozenset(router.address for router in routers)
        for _ in range(2):
            self.asked.clear()
            await asyncio.wait_for(self.asked.wait(), LIMIT_S)


@asynccontextmanager
async def running(*routers: Router) -> AsyncIterator[None]:
    for router in routers:
        await router.server.start()
    try:
        yield
    finally:
        for router in routers:
            await router.server.stop(None)


async def test_a_worker_follows_the_name_of_its_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    name, one, two, fixed = Name(), Router(), Router(), Router()
    monkeypatch.setattr(membership, "addresses_of", name)
    monkeypatch.setattr(membership, "RESOLVE_S", 0.02)
    load = WorkerLoad(num_pages=1)
    member = Membership(("dns+routers.svc:50051", fixed.address), b"secret", RECORD, lambda: load)
    async with running(one, two, fixed):
        member.start()
        await fixed.until(1)
        await name.say(one)
        await one.until(1)
        await name.say(one, two)
        await two.until(1)
        await name.say()  # a name server that is away takes nobody from us
        assert (one.members, two.members) == (1, 1)
        await name.say(two)
        assert one.members == 1, "a router that lives is not left for what its name says"
        await one.server.stop(None)
        async with asyncio.timeout(LIMIT_S):
            while one.address in member._dialled:
                await name.say(two)
        await name.say(one, two)
        assert member._dialled == {one.address, two.address, fixed.address}
        await member.stop()
        await asyncio.gather(two.until(0), fixed.until(0))


async def test_a_name_is_asked_for_all_its_addresses() -> None:
    assert "127.0.0.1:50051" in await addresses_of("localhost:50051")
    assert await addresses_of("[::1]:7") == {"[::1]:7"}
    assert await addresses_of("no-such-name.invalid:1") == frozenset()
