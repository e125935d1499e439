"""A worker's membership with its routers: one long Join stream to each, registered again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio

from pdserve.config.addresses import DNS, host_port
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


RESOLVE_S = 2.0
"""How often a router's name is asked for; a new router is met that much later."""


async def addresses_of(name: str) -> frozenset[str]:
    """host:port of every address behind host:port; none when the name can not be asked, or has none."""
    host, _, port = name.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except OSError:
        log.info("a router's name has no address now")
        return frozenset()
    return frozenset(host_port(str(address[0]), int(port)) for *_, address in found)


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
        self._tasks: set[asyncio.Task[None]] = set()
        self.joined: set[str] = set()
        self._dialled: set[str] = set()
        self._behind: dict[str, frozenset[str]] = {}
        self._samples: dict[str, ClockSample] = {}

    def start(self) -> None:
        """Dials all routers, now and whenever a stream breaks."""
        for entry in self._routers:
            if entry.startswith(DNS):
                self._spawn(self._follow(entry.removeprefix(DNS)))
            else:
                self._behind[entry] = frozenset({entry})
                self._dial(entry)

    def _dial(self, address: str) -> None:
        self._dialled.add(address)
        self._spawn(self._keep(address))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wanted(self, address: str) -> bool:
        return not self._leaving.is_set() and any(address in found for found in self._behind.values())

    async def _follow(self, name: str) -> None:
        """Dials every address behind a name. One that the name has no more is left when its stream ends."""
        while not self._leaving.is_set():
            self._behind[name] = await addresses_of(name) or self._behind.get(name, frozenset())
            for address in sorted(self._behind[name] - self._dialled):
                self._dial(address)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), RESOLVE_S)

    async def stop(self) -> None:
        """Says goodbye and closes the streams."""
        self._leaving.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in tuple(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep(self, address: str) -> None:
        delay = FIRST_RETRY_S
        channels = Renewing(self._tls, lambda: open_channel(address, tls=self._tls), close_soon)
        try:
            while self._wanted(address):
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
            self._dialled.discard(address)
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
