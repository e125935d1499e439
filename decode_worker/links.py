"""Exchange streams from a decode worker to the prefill workers it pulls from.

What lives here: dialling, reconnecting, sending and receiving envelopes. What does not: what they mean. A
broken stream makes nothing happen by itself: leases and the router decide (protocol.md §3).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio

from decode_worker.loop import DecodeRole
from kvtransfer.effects import Dial, ToPrefiller
from kvtransfer.port import WorkerPort
from pdserve.messages import Envelope, Renew, TransferMessage
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.credentials import Renewing, close_soon
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.outbox import MAX_BATCH
from pdserve.rpc.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.types import PeerRef

log = logging.getLogger(__name__)

MAX_OUTBOX = 16384
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
FORGET_AFTER = 20
"""Failed tries in a row after which a peer is forgotten; a new Dial starts again."""


class Links:
    """All links of one decode worker, one per prefill worker and incarnation. Control thread only."""

    def __init__(
        self, port: WorkerPort, role: DecodeRole, on_over: Callable[[PeerRef], None] = lambda peer: None
    ) -> None:
        """on_over: called with a peer that is given up."""
        self._port = port
        self._role = role
        self._on_over = on_over
        self._links: dict[tuple[str, int], Link] = {}
        port.on(Dial, self._dial)
        port.on(ToPrefiller, self._send)

    def _dial(self, effect: Dial) -> None:
        peer = effect.peer
        name = (peer.worker_id, peer.incarnation)
        link = self._links.get(name)
        if link is None or link.over:
            self._links[name] = Link(self._port, self._role, peer, self._on_over)
        for other in [n for n, link in self._links.items() if link.over]:
            del self._links[other]

    def _send(self, effect: ToPrefiller) -> None:
        link = self._links.get((effect.peer, effect.incarnation))
        if link is not None:
            link.send(effect.message)

    async def stop(self) -> None:
        """Closes all links."""
        await asyncio.gather(*(link.stop() for link in self._links.values()))
        self._links.clear()


class Link:
    """One exchange stream, dialled again when it breaks; what is sent meanwhile waits in a bounded queue."""

    def __init__(
        self, port: WorkerPort, role: DecodeRole, peer: PeerRef, on_over: Callable[[PeerRef], None]
    ) -> None:
        self._on_over = on_over
        self._port = port
        self._role = role
        self._peer = peer
        self._outbox: deque[TransferMessage] = deque(maxlen=MAX_OUTBOX)
        self._wake = asyncio.Event()
        self._stream = object()
        self._given_up = False
        self._task = port.loop.create_task(self._run())

    @property
    def over(self) -> bool:
        """Whether it has given up, though its channel may not be closed yet: nothing is sent any more."""
        return self._given_up or self._task.done()

    def send(self, message: TransferMessage) -> None:
        """Queues a message; the oldest is lost when the queue is full (timers repeat it)."""
        if len(self._outbox) == MAX_OUTBOX:
            self._port.count("unsent_messages")
        self._outbox.append(message)
        self._wake.set()

    async def stop(self) -> None:
        """Closes the stream."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        failures = 0
        tls = self._port.parts.tls
        channels = Renewing(tls, lambda: open_channel(self._peer.control, tls=tls), close_soon)
        secret = self._port.parts.context.secret
        try:
            while failures < FORGET_AFTER:
                try:
                    stub = authenticated(transfer_pb2_grpc.TransferServiceStub(channels.current()), secret)
                    self._stream = object()
                    self._wake.set()
                    async for response in stub.Exchange(self._requests(self._stream)):
                        failures = 0
                        envelopes, num_unreadable = convert.envelopes_from_pb(response.envelopes)
                        self._port.count("unreadable_envelopes", num_unreadable)
                        self._receive(envelopes)
                except grpc.aio.AioRpcError as error:
                    log.info("link to a prefill worker broke: %s", error.code().name)
                    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                        return  # the peer is another incarnation by now
                failures += 1
                await asyncio.sleep(min(LAST_RETRY_S, FIRST_RETRY_S * 2**failures))
        finally:
            self._given_up = True  # before anything is waited for: a Dial from here on makes a new link
            self._on_over(self._peer)
            await asyncio.gather(*(channel.close(None) for channel in channels.all()))

    async def _requests(self, stream: object) -> AsyncIterator[transfer_pb2.ExchangeRequest]:
        yield self._wrap([Renew(keys=(), answer=True)])  # says who we are
        while True:
            while not self._outbox and self._stream is stream:
                self._wake.clear()
                await self._wake.wait()
            if self._stream is not stream:
                return  # gRPC leaves the generator of a broken stream waiting; it must take no message
            yield self._wrap([self._outbox.popleft() for _ in range(min(MAX_BATCH, len(self._outbox)))])

    def _wrap(self, messages: Sequence[TransferMessage]) -> transfer_pb2.ExchangeRequest:
        me, to = self._port.parts.context, self._peer.incarnation
        return transfer_pb2.ExchangeRequest(
            envelopes=(
                convert.envelope_to_pb(
                    Envelope(
                        sender=me.worker_id, sender_incarnation=me.incarnation, receiver_incarnation=to,
                        message=message,
                    )
                )
                for message in messages
            )
        )  # fmt: skip

    def _receive(self, envelopes: Sequence[Envelope]) -> None:
        """All of them as one input: what they lead to is sent and planned together."""
        me, peer = self._port.parts.context.incarnation, (self._peer.worker_id, self._peer.incarnation)
        ours = [
            each.message
            for each in envelopes
            if (each.sender, each.sender_incarnation) == peer and each.receiver_incarnation == me
        ]
        self._port.count("foreign_envelopes", len(envelopes) - len(ours))
        if ours:
            self._port.feed(lambda now: [e for each in ours for e in self._role.message(*peer, each, now)])
