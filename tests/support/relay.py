"""A man in the middle of the exchange streams between decode workers and a prefill worker.

What lives here: a gRPC server that decode workers dial in place of prefill's, and that passes on each message
as the test's hooks say. What does not: page bytes (`tests.support.chaos`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc.aio

from pdserve.messages import Envelope, TransferMessage
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import transfer_pb2, transfer_pb2_grpc

Hook = Callable[[TransferMessage], list[TransferMessage]]


def passed(message: TransferMessage) -> list[TransferMessage]:
    """The hook that changes nothing."""
    return [message]


class Relay(transfer_pb2_grpc.TransferServiceServicer):
    """Runs in a thread of its own. Hooks run there, one at a time; `log` has what was passed on."""

    def __init__(self, target: str, secret: bytes) -> None:
        self.to_decode: Hook = passed
        self.to_prefill: Hook = passed
        self.log: list[TransferMessage] = []
        self.errors: list[Exception] = []
        self._target, self._secret = target, secret
        self._streams: dict[int, tuple[Envelope, asyncio.Queue[Envelope]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = self._call(self._listen())

    def reset(self) -> None:
        """Passes everything on again, and forgets what was."""
        self.to_decode = self.to_prefill = passed
        self.log = []

    def tell(self, incarnation: int, message: TransferMessage) -> None:
        """Says something to the decode worker of that incarnation as if prefill had."""
        envelope, queue = self._streams[incarnation]
        self._loop.call_soon_threadsafe(queue.put_nowait, replace(envelope, message=message))

    def stop(self) -> None:
        """Ends it."""
        self._call(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _listen(self) -> str:
        self._server = grpc.aio.server()
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def Exchange(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[transfer_pb2.ExchangeResponse]:
        """One decode worker's stream, and one of ours to prefill."""
        channel = open_channel(self._target)
        out: asyncio.Queue[Envelope] = asyncio.Queue()
        call = authenticated(transfer_pb2_grpc.TransferServiceStub(channel), self._secret).Exchange(
            self._upward(request_iterator)
        )
        reader = asyncio.ensure_future(self._downward(call, out))
        try:
            while True:
                envelope = await out.get()
                yield transfer_pb2.ExchangeResponse(envelopes=[convert.envelope_to_pb(envelope)])
        finally:
            reader.cancel()
            call.cancel()
            await channel.close(None)

    async def _upward(self, requests: AsyncIterator[Any]) -> AsyncIterator[transfer_pb2.ExchangeRequest]:
        async for request in requests:
            for envelope in map(convert.envelope_from_pb, request.envelopes):
                for message in self._hooked(self.to_prefill, envelope.message):
                    made = convert.envelope_to_pb(replace(envelope, message=message))
                    yield transfer_pb2.ExchangeRequest(envelopes=[made])

    async def _downward(self, call: Any, out: asyncio.Queue[Envelope]) -> None:
        async for response in call:
            for envelope in map(convert.envelope_from_pb, response.envelopes):
                self._streams[envelope.receiver_incarnation] = (envelope, out)
                for message in self._hooked(self.to_decode, envelope.message):
                    out.put_nowait(replace(envelope, message=message))

    def _hooked(self, hook: Hook, message: TransferMessage) -> list[TransferMessage]:
        try:
            messages = hook(message)
        except Exception as error:  # the stream must go on; the test is told when it ends
            self.errors.append(error)
            messages = [message]
        self.log += messages
        return messages
