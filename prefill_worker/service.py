"""The prefill role's gRPC services and effect handlers: router calls in, exchange streams to decode workers.

What lives here: asyncio and protobuf around `prefill_worker.loop`. What does not: decisions (loop, session),
page bytes (`prefill_worker.handoff`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import ServicerContext

from kvtransfer.effects import AnswerPrefill, ComputeDigest, ToDecoder
from kvtransfer.port import WorkerPort
from pdserve.errors import StalePeer
from pdserve.messages import Envelope, Outcome, Prefilled, Refused
from pdserve.rpc import convert
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import prefill_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from pdserve.types import Key
from prefill_worker.handoff import Handoff
from prefill_worker.loop import PrefillRole

MAX_OUTBOX = 16384
Context = ServicerContext[Any, Any]
Outbox = asyncio.Queue[Envelope]


class PrefillDriver(
    prefill_pb2_grpc.PrefillServiceServicer, transfer_pb2_grpc.TransferServiceServicer
):  # fmt: skip
    """Drives one PrefillRole. Lives on the control thread."""

    def __init__(self, port: WorkerPort) -> None:
        parts = port.parts
        self._port = port
        self.role = PrefillRole(parts.context, parts.pages, parts.scheduler)
        self._handoff = Handoff(port, self.role)
        self._calls: dict[Key, list[asyncio.Future[Prefilled | Refused]]] = {}
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        port.on(AnswerPrefill, self._answer)
        port.on(ToDecoder, self._send)
        port.on(ComputeDigest, self._handoff.digest)

    def services(self, server: RpcServer) -> tuple[str, ...]:
        """Adds PrefillService and TransferService."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server.server)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, server.server)
        return "pdserve.rpc.v1.PrefillService", "pdserve.rpc.v1.TransferService"

    async def start(self, control: str) -> dict[str, str]:
        """Starts the page servers of every configured transport; returns their endpoints by name."""
        return await asyncio.to_thread(self._handoff.start)

    async def stop(self) -> None:
        """Closes the page servers."""
        await asyncio.to_thread(self._handoff.stop)

    # -- PrefillService ---------------------------------------------------------------------------------

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> prefill_pb2.PrefillResponse:
        """Router → here. A broken call is a cancel."""
        call = convert.prefill_from_pb(request)
        future: asyncio.Future[Prefilled | Refused] = self._port.loop.create_future()
        self._calls.setdefault(call.key, []).append(future)
        try:
            self._port.feed(lambda now: self.role.prefill(call, now))
            return convert.prefill_result_to_pb(await future)
        except asyncio.CancelledError:
            self._cancel(call.key)
            raise
        finally:
            self._forget(call.key, future)

    async def CancelPrefill(  # noqa: N802
        self, request: prefill_pb2.CancelPrefillRequest, context: Context
    ) -> prefill_pb2.CancelPrefillResponse:
        """Router → here: stop this key, and every lower one."""
        if request.receiver_incarnation != self._port.parts.context.incarnation:
            raise StalePeer("this worker was restarted since")
        outcome = self._cancel(convert.key_from_pb(request.key))
        return prefill_pb2.CancelPrefillResponse(outcome=convert.outcome_to_pb(outcome))

    def _cancel(self, key: Key) -> Outcome:
        outcome = Outcome.UNKNOWN

        def make(now: float) -> list[Any]:
            nonlocal outcome
            outcome, effects = self.role.cancel(key, now)
            return effects

        self._port.feed(make)
        return outcome

    def _answer(self, effect: AnswerPrefill) -> None:
        for future in self._calls.get(effect.key, []):
            if not future.done():
                future.set_result(effect.message)

    def _forget(self, key: Key, future: asyncio.Future[Prefilled | Refused]) -> None:
        waiting = self._calls.get(key, [])
        waiting.remove(future)
        if not waiting:
            self._calls.pop(key, None)

    # -- TransferService --------------------------------------------------------------------------------

    async def Exchange(  # noqa: N802
        self, request_iterator: AsyncIterator[transfer_pb2.ExchangeRequest], context: Context
    ) -> AsyncIterator[transfer_pb2.ExchangeResponse]:
        """A decode worker dialled. Its first envelope says who it is; the stream serves that incarnation."""
        first = convert.envelope_from_pb((await anext(request_iterator)).envelope)
        if first.receiver_incarnation != self._port.parts.context.incarnation:
            raise StalePeer("this worker was restarted since")
        peer = (first.sender, first.sender_incarnation)
        outbox: Outbox = asyncio.Queue(MAX_OUTBOX)
        self._outboxes[peer] = outbox
        self._receive(first)
        reader = asyncio.create_task(self._read(request_iterator, peer))
        try:
            while (envelope := await _next(outbox, reader)) is not None:
                yield transfer_pb2.ExchangeResponse(envelope=convert.envelope_to_pb(envelope))
        finally:
            reader.cancel()
            if self._outboxes.get(peer) is outbox:
                del self._outboxes[peer]

    async def _read(
        self, requests: AsyncIterator[transfer_pb2.ExchangeRequest], peer: tuple[str, int]
    ) -> None:
        async for request in requests:
            envelope = convert.envelope_from_pb(request.envelope)
            if (envelope.sender, envelope.sender_incarnation) == peer:
                self._receive(envelope)
            else:
                self._port.count("foreign_envelopes")

    def _receive(self, envelope: Envelope) -> None:
        if envelope.receiver_incarnation != self._port.parts.context.incarnation:
            self._port.count("foreign_envelopes")
            return
        sender, incarnation = envelope.sender, envelope.sender_incarnation
        self._port.feed(lambda now: self.role.message(sender, incarnation, envelope.message, now))

    def _send(self, effect: ToDecoder) -> None:
        """Queues a message; with no stream, or a full queue, it is lost and a timer repeats it."""
        outbox = self._outboxes.get((effect.peer, effect.incarnation))
        if outbox is None or outbox.full():
            self._port.count("unsent_messages")
            return
        me = self._port.parts.context
        outbox.put_nowait(
            Envelope(
                sender=me.worker_id,
                sender_incarnation=me.incarnation,
                receiver_incarnation=effect.incarnation,
                message=effect.message,
            )
        )


async def _next(outbox: Outbox, reader: asyncio.Task[None]) -> Envelope | None:
    """The next envelope to send; None when the other side's stream is over."""
    if not outbox.empty():
        return outbox.get_nowait()
    getter = asyncio.ensure_future(outbox.get())
    try:
        await asyncio.wait({getter, reader}, return_when=asyncio.FIRST_COMPLETED)
        return getter.result() if getter.done() else None
    finally:
        getter.cancel()
