"""A prefill worker's control half in the hands of a test: its exchange streams, and nothing behind them."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdserve.messages import Envelope, TransferMessage
from pdserve.rpc import convert
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.rpc.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.types import PeerRef


@dataclass
class Stream:
    """One exchange stream of a decode worker. The first message it sent only said who it is."""

    peer: tuple[str, int]
    sender: tuple[str, int]
    received: asyncio.Queue[TransferMessage] = field(default_factory=asyncio.Queue)
    outbox: asyncio.Queue[transfer_pb2.ExchangeResponse | None] = field(default_factory=asyncio.Queue)

    def send(self, *messages: TransferMessage) -> None:
        """To the decode worker, in one message of the stream."""
        self.send_raw(*(convert.envelope_to_pb(self._wrap(message)) for message in messages))

    def send_raw(self, *envelopes: transfer_pb2.Envelope) -> None:
        self.outbox.put_nowait(transfer_pb2.ExchangeResponse(envelopes=envelopes))

    def break_off(self) -> None:
        """Ends it as a lost connection does."""
        self.outbox.put_nowait(None)

    async def next(self, kind: type[Any]) -> Any:
        """The next message of this kind, others are skipped."""
        async with asyncio.timeout(20):
            while True:
                message = await self.received.get()
                if isinstance(message, kind):
                    return message

    def _wrap(self, message: TransferMessage) -> Envelope:
        return Envelope(
            sender=self.sender[0], sender_incarnation=self.sender[1], receiver_incarnation=self.peer[1],
            message=message,
        )  # fmt: skip


class FakePrefill(transfer_pb2_grpc.TransferServiceServicer):
    """Takes exchange streams; `streams` has each as it comes."""

    def __init__(self, worker_id: str = "p", *, tcp: str = "") -> None:
        """tcp: host:port of its page server."""
        self._id, self._tcp = worker_id, tcp
        self._incarnation = secrets.randbits(63) | 1
        self._server = RpcServer(ServerOptions())
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.num_streams = 0

    async def __aenter__(self) -> FakePrefill:
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, self._server.server)
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)

    @property
    def ref(self) -> PeerRef:
        return PeerRef(
            worker_id=self._id, incarnation=self._incarnation, control=self._server.address, tcp=self._tcp
        )

    async def stream(self) -> Stream:
        """The next stream."""
        async with asyncio.timeout(20):
            return await self.streams.get()

    async def Exchange(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        first = convert.envelope_from_pb((await anext(request_iterator)).envelopes[0])
        stream = Stream((first.sender, first.sender_incarnation), (self._id, self._incarnation))
        self.num_streams += 1
        self.streams.put_nowait(stream)
        reader = asyncio.ensure_future(self._read(request_iterator, stream))
        try:
            while (response := await stream.outbox.get()) is not None:
                await context.write(response)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the test broke it")
        finally:
            reader.cancel()

    async def _read(self, requests: Any, stream: Stream) -> None:
        async for request in requests:
            for each in request.envelopes:
                stream.received.put_nowait(convert.envelope_from_pb(each).message)
