"""Links of a decode worker when one is given up: whoever dials from then on gets a new one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from decode_worker.links import Links
from kvtransfer.effects import Dial
from kvtransfer.session.guard import RoleContext
from pdserve.errors import StalePeer
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.rpc.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.types import PeerRef


class StaleServer(transfer_pb2_grpc.TransferServiceServicer):
    """A prefill worker that is another incarnation by now; counts who asks."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    async def Exchange(  # noqa: N802
        self, request_iterator: AsyncIterator[transfer_pb2.ExchangeRequest], context: Any
    ) -> AsyncIterator[transfer_pb2.ExchangeResponse]:
        self.asked.release()
        raise StalePeer("this worker was restarted since")
        yield


class Port:
    """As much of a worker's port as links use."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        me = RoleContext(
            worker_id="d", incarnation=8, page_size=4, max_context=64, model="m", numerics="n",
            secret=b"s" * 32,
        )  # fmt: skip
        self.parts = SimpleNamespace(tls=None, context=me)
        self.handlers: dict[type, Callable[[Any], None]] = {}

    def on(self, effect: type, handler: Callable[[Any], None]) -> None:
        self.handlers[effect] = handler

    def count(self, name: str, amount: int = 1) -> None:
        assert not amount, name


async def test_who_dials_while_a_given_up_link_closes_gets_a_new_one() -> None:
    server, servicer, port = RpcServer(ServerOptions()), StaleServer(), Port()
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server.server)
    await server.start("pdserve.rpc.v1.TransferService")
    peer = PeerRef(worker_id="p", incarnation=7, control=server.address, host_id="here")
    given_up = 0

    def dial_again(over: PeerRef) -> None:
        nonlocal given_up
        given_up += 1
        if given_up == 1:
            port.handlers[Dial](Dial(peer=over))

    links = Links(port, SimpleNamespace(), on_over=dial_again)  # type: ignore[arg-type]
    port.handlers[Dial](Dial(peer=peer))
    try:
        async with asyncio.timeout(10):
            for _ in range(2):
                await servicer.asked.acquire()
    finally:
        await links.stop()
        await server.stop()
