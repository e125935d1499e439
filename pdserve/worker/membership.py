"""A worker's membership with its routers: one long Join stream to each, registered again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio

from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.convert import Heartbeat, JoinEvent, Leave, Register
from pdserve.rpc.credentials import Renewing, close_soon
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.tls import TlsSource
from pdserve.types import ClockSample, WorkerLoad, WorkerRecord

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
FIRST_BEATS, FIRST_BEAT_S = 8, 0.05
"""A new stream begins with a few quick ones, so that the router knows our clock at once."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 0.25
"""A router that is back has to serve within two seconds (reliability.md), and knows nobody by then."""


class Membership:
    """Keeps this worker registered with every router. Control thread only."""

    def __init__(
        self,
        routers: tuple[str, ...],
        secret: bytes,
        record: WorkerRecord,
        load: Callable[[], WorkerLoad],
        tls: TlsSource | None = None,
    ) -> None:
        """secret: the fleet's. tls: our certificate."""
        self._secret, self._tls = secret, tls
        self._routers = routers
        self._record = record
        self._load = load
        self._leaving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.joined: set[str] = set()
        self._samples: dict[str, ClockSample] = {}

    def start(self) -> None:
        """Dials all routers, now and whenever a stream breaks."""
        self._tasks = [asyncio.create_task(self._keep(address)) for address in self._routers]

    async def stop(self) -> None:
        """Says goodbye and closes the streams."""
        self._leaving.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep(self, address: str) -> None:
        delay = FIRST_RETRY_S
        channels = Renewing(self._tls, lambda: open_channel(address, tls=self._tls), close_soon)
        try:
            while not self._leaving.is_set():
                try:
                    stub = authenticated(
                        cluster_pb2_grpc.ClusterServiceStub(channels.current()), self._secret
                    )
                    async for response in stub.Join(self._events(address)):
                        self._on_answer(address, convert.join_answer_from_pb(response), self._now())
                        delay = FIRST_RETRY_S
                except grpc.aio.AioRpcError as error:
                    log.info("a router is not reachable: %s", error.code().name)
                self.joined.discard(address)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), delay)
                delay = min(LAST_RETRY_S, 2 * delay)
        finally:
            await asyncio.gather(*(channel.close(None) for channel in channels.all()))

    def _on_answer(self, address: str, answer: convert.JoinAnswer, now: float) -> None:
        if answer.accepted:
            self.joined.add(address)
            self._samples[address] = ClockSample(
                sent_s=answer.echo_s, received_s=answer.received_s, replied_s=answer.replied_s, answered_s=now
            )
        else:
            self.joined.discard(address)
            log.warning("a router does not take this worker: %s", answer.problem)

    async def _events(self, address: str) -> AsyncIterator[cluster_pb2.JoinRequest]:
        self._samples.pop(address, None)
        yield self._pb(Register(record=self._record, monotonic_s=self._now()))
        first = FIRST_BEATS
        while not self._leaving.is_set():
            load, sample = self._load(), self._samples.pop(address, None)
            yield self._pb(Heartbeat(load=load, monotonic_s=self._now(), sample=sample))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), FIRST_BEAT_S if first > 0 else HEARTBEAT_S)
            first -= 1
        yield self._pb(Leave(reason="stopping"))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _pb(self, event: JoinEvent) -> cluster_pb2.JoinRequest:
        return convert.join_event_to_pb(event)
