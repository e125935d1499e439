"""The prefill role's gRPC services and effect handlers: router calls in, exchange streams to decode workers.

What lives here: asyncio and protobuf around `prefill_worker.loop`. What does not: decisions (loop, session),
page bytes (`prefill_worker.handoff`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc.aio import ServicerContext

from kvtransfer.effects import AnswerPrefill, ComputeDigest, ToDecoder
from kvtransfer.grammars import grammar_held
from kvtransfer.port import WorkerPort
from pdserve.errors import InvalidRequest, StalePeer
from pdserve.messages import Envelope, Outcome, Prefilled, PrefillRequest, Refused
from pdserve.obs.catalogue import worker as metrics
from pdserve.rpc import convert
from pdserve.rpc.outbox import MAX_BATCH, Outbox
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import prefill_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from pdserve.types import Key
from prefill_worker.handoff import Handoff
from prefill_worker.loop import PrefillRole

Context = ServicerContext[Any, Any]


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
        self._asking: asyncio.Future[Prefilled | Refused] | None = None  # whose call the core looks at now
        self._outboxes: dict[tuple[str, int], Outbox[Envelope]] = {}
        port.on(AnswerPrefill, self._answer)
        port.on(ToDecoder, self._send)
        port.on(ComputeDigest, self._handoff.digest)
        port.after_step(self._handoff.after_step)

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
        """Router → here. A broken call is a cancel, if it is the last one of its key."""
        call = convert.prefill_from_pb(request)
        work = self._port.parts.works.began(call, context)
        result: Prefilled | Refused | None = None
        try:
            result = await self._served(call)
            return convert.prefill_result_to_pb(result)
        finally:
            work.prefilled(result)
            if isinstance(result, Refused):
                self._port.measure(metrics.REFUSALS, 1, (result.reason,))

    async def _served(self, call: PrefillRequest) -> Prefilled | Refused:
        held = await grammar_held(self._port.parts.grammars, call)
        if isinstance(held, Refused):
            return held
        with held:
            return await self._result(call)

    async def _result(self, call: PrefillRequest) -> Prefilled | Refused:
        future: asyncio.Future[Prefilled | Refused] = self._port.loop.create_future()
        self._calls.setdefault(call.key, []).append(future)
        try:
            self._asking = future
            self._port.feed(lambda now: self.role.prefill(call, now))
            self._asking = None
            return await future
        except asyncio.CancelledError:
            if self._calls[call.key] == [future]:
                self._cancel(call.key)
            raise
        finally:
            self._forget(call.key, future)

    async def CancelPrefill(  # noqa: N802
        self, request: prefill_pb2.CancelPrefillRequest, context: Context
    ) -> prefill_pb2.CancelPrefillResponse:
        """Router → here: stop this key, and every lower one."""
        if request.receiver_incarnation != self._port.parts.context.incarnation:
            self._port.measure(metrics.FENCED_MESSAGES)
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
        refused = self._asking if isinstance(effect.message, Refused) else None  # not its key's others
        for future in self._calls.get(effect.key, []):
            if not future.done() and (refused is None or future is refused):
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
        opening = (await anext(request_iterator)).envelopes
        if not 0 < len(opening) <= MAX_BATCH:
            raise InvalidRequest.field("envelopes", f"a stream begins with who it is, in 1 to {MAX_BATCH}")
        hello = [convert.envelope_from_pb(each) for each in opening]
        first = hello[0]
        if first.receiver_incarnation != self._port.parts.context.incarnation:
            self._port.measure(metrics.FENCED_MESSAGES)
            raise StalePeer("this worker was restarted since")
        peer = (first.sender, first.sender_incarnation)
        outbox: Outbox[Envelope] = Outbox()
        self._outboxes[peer] = outbox
        self._receive(hello, peer)
        reader = asyncio.create_task(self._read(request_iterator, peer))
        reader.add_done_callback(lambda _: outbox.close())
        try:
            while batch := await outbox.take():
                yield transfer_pb2.ExchangeResponse(envelopes=map(convert.envelope_to_pb, batch))
        finally:
            reader.cancel()
            if self._outboxes.get(peer) is outbox:
                del self._outboxes[peer]

    async def _read(
        self, requests: AsyncIterator[transfer_pb2.ExchangeRequest], peer: tuple[str, int]
    ) -> None:
        async for request in requests:
            envelopes, num_unreadable = convert.envelopes_from_pb(request.envelopes)
            self._port.count("unreadable_envelopes", num_unreadable)
            self._receive(envelopes, peer)

    def _receive(self, envelopes: Sequence[Envelope], peer: tuple[str, int]) -> None:
        """All of them as one input: what they lead to is sent and planned together."""
        me = self._port.parts.context.incarnation
        ours = [
            each.message
            for each in envelopes
            if (each.sender, each.sender_incarnation) == peer and each.receiver_incarnation == me
        ]
        self._port.count("foreign_envelopes", len(envelopes) - len(ours))
        if ours:
            self._port.feed(lambda now: [e for each in ours for e in self.role.message(*peer, each, now)])

    def _send(self, effect: ToDecoder) -> None:
        """Queues a message; with no stream, or a full queue, it is lost and a timer repeats it."""
        outbox = self._outboxes.get((effect.peer, effect.incarnation))
        me = self._port.parts.context
        envelope = Envelope(
            sender=me.worker_id,
            sender_incarnation=me.incarnation,
            receiver_incarnation=effect.incarnation,
            message=effect.message,
        )
        if outbox is None or not outbox.put(envelope):
            self._port.count("unsent_messages")
