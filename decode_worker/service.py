"""The decode role's gRPC service and effect handlers: router calls in, tokens out.

What lives here: asyncio and protobuf around `decode_worker.loop`. What does not: decisions (loop, session),
links to prefill workers (`decode_worker.links`), page bytes (`decode_worker.reads`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc.aio import ServicerContext

from decode_worker.links import Links
from decode_worker.loop import DecodeRole
from decode_worker.reads import Reads
from kvtransfer.effects import AnswerDecode, Effect
from kvtransfer.grammars import grammar_held
from kvtransfer.port import WorkerPort
from pdserve import failpoints
from pdserve.errors import StalePeer
from pdserve.messages import Ended, Outcome, Refused, Reserved, Token
from pdserve.obs.catalogue import worker as metrics
from pdserve.obs.work import Work
from pdserve.rpc import convert
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import decode_pb2, decode_pb2_grpc
from pdserve.types import Key

Context = ServicerContext[Any, Any]
Event = Reserved | Refused | Token | Ended


class DecodeDriver(decode_pb2_grpc.DecodeServiceServicer):
    """Drives one DecodeRole. Lives on the control thread."""

    def __init__(self, port: WorkerPort) -> None:
        parts = port.parts
        self._port = port
        self.role = DecodeRole(parts.context, parts.pages, parts.scheduler, page_bytes=parts.page_bytes)
        self._calls: dict[Key, list[asyncio.Queue[Event]]] = {}
        self._asking: asyncio.Queue[Event] | None = None  # whose Reserve the core looks at just now
        self._reads = Reads(port, self.role)
        self._links = Links(port, self.role, on_over=self._reads.forget)
        port.on(AnswerDecode, self._answer)

    def services(self, server: RpcServer) -> tuple[str, ...]:
        """Adds DecodeService."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server.server)
        return ("pdserve.rpc.v1.DecodeService",)

    async def start(self, control: str) -> dict[str, str]:
        """Nothing listens here: decode dials."""
        return {}

    async def stop(self) -> None:
        """Ends links and reads."""
        await self._links.stop()
        await asyncio.to_thread(self._reads.stop)

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> AsyncIterator[decode_pb2.ReserveResponse]:
        """Router → here. The same key on a second stream hears everything again, on both. When the last
        stream of a key breaks, that is a cancel."""
        call = convert.reserve_from_pb(request)
        work = self._port.parts.works.began(call, context)
        held = await grammar_held(self._port.parts.grammars, call)
        if isinstance(held, Refused):
            self._ended(work, held)
            yield convert.decode_event_to_pb(held)
            return
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._calls.setdefault(call.key, []).append(queue)
        over, event = False, None
        try:
            with held:
                self._asking = queue
                self._port.feed(lambda now: self.role.reserve(call, now))
                self._asking = None
                while not over:
                    event = await queue.get()
                    over = isinstance(event, Refused | Ended)
                    wait_s = failpoints.stall_s("return") if isinstance(event, Token) else 0.0
                    if wait_s:
                        await asyncio.sleep(wait_s)
                    yield convert.decode_event_to_pb(event)
        finally:
            if self._forget(call.key, queue) and not over:
                self._ask(lambda now: self.role.cancel(call.key, now))
            self._ended(work, event if isinstance(event, Refused | Ended) else None)

    def _ended(self, work: Work, result: Ended | Refused | None) -> None:
        """A call is over; None: its caller broke it off."""
        work.decoded(result)
        if isinstance(result, Refused):
            self._port.measure(metrics.REFUSALS, 1, (result.reason,))

    async def CancelDecode(  # noqa: N802
        self, request: decode_pb2.CancelDecodeRequest, context: Context
    ) -> decode_pb2.CancelDecodeResponse:
        """Router → here: stop this key, and every lower one."""
        key = self._checked(request)
        outcome = self._ask(lambda now: self.role.cancel(key, now))
        return decode_pb2.CancelDecodeResponse(outcome=convert.outcome_to_pb(outcome))

    async def SwitchLocal(  # noqa: N802
        self, request: decode_pb2.SwitchLocalRequest, context: Context
    ) -> decode_pb2.SwitchLocalResponse:
        """Router → here: the prefill worker is gone, go on alone."""
        key = self._checked(request)
        outcome = self._ask(lambda now: self.role.switch_local(key, now))
        return decode_pb2.SwitchLocalResponse(outcome=convert.outcome_to_pb(outcome))

    def _checked(self, request: decode_pb2.CancelDecodeRequest | decode_pb2.SwitchLocalRequest) -> Key:
        if request.receiver_incarnation != self._port.parts.context.incarnation:
            self._port.measure(metrics.FENCED_MESSAGES)
            raise StalePeer("this worker was restarted since")
        return convert.key_from_pb(request.key)

    def _ask(self, ask: Callable[[float], tuple[Outcome, list[Effect]]]) -> Outcome:
        outcome = Outcome.UNKNOWN

        def make(now: float) -> list[Effect]:
            nonlocal outcome
            outcome, effects = ask(now)
            return effects

        self._port.feed(make)
        return outcome

    def _answer(self, effect: AnswerDecode) -> None:
        message = effect.message
        if isinstance(message, Token) and message.ledger is not None:
            failpoints.stall("admit")
            message = self.role.emitted(message, self._port.loop.time())
        refused = self._asking if isinstance(message, Refused) else None  # this call, not its key's others
        for queue in self._calls.get(effect.key, []):
            if refused is None or queue is refused:
                queue.put_nowait(message)

    def _forget(self, key: Key, queue: asyncio.Queue[Event]) -> bool:
        """True if that was the key's last stream."""
        left = [each for each in self._calls[key] if each is not queue]
        if left:
            self._calls[key] = left
        else:
            del self._calls[key]
        return not left
