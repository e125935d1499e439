"""What a refused call held is gone with it: nothing waits for Python's collector, however large it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pdserve.errors import InvalidRequest
from pdserve.rpc.channel import open_channel
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, transfer_pb2, transfer_pb2_grpc


class Held:
    """Stands for what a handler holds of a large request."""


class Refusing(transfer_pb2_grpc.TransferServiceServicer, cluster_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.held: list[weakref.ref[Held]] = []

    def refuse(self) -> None:
        large = Held()
        self.held.append(weakref.ref(large))
        raise InvalidRequest.field("envelopes", "are too many")

    async def Exchange(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for _ in requests:
            self.refuse()
            yield transfer_pb2.ExchangeResponse()

    async def GetWorkerStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.refuse()


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_refused_call_leaves_nothing_for_the_collector(no_collector: None) -> None:
    server, servicer = RpcServer(ServerOptions()), Refusing()
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server.server)
    cluster_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    await server.start("pdserve.rpc.v1.TransferService")
    channel = open_channel(server.address)
    try:
        stream = transfer_pb2_grpc.TransferServiceStub(channel).Exchange(
            iter([transfer_pb2.ExchangeRequest()])
        )
        with pytest.raises(grpc.aio.AioRpcError, match="too many"):
            await stream.read()
        with pytest.raises(grpc.aio.AioRpcError, match="too many"):
            await cluster_pb2_grpc.WorkerServiceStub(channel).GetWorkerStatus(
                cluster_pb2.GetWorkerStatusRequest()
            )
    finally:
        await channel.close(None)
        await server.stop(0)
    assert [each() for each in servicer.held] == [None, None]
