"""A throttled TCP proxy, and a sponsor that registers a worker with the router under the proxy's address.

What lives here: slowing the data plane of a real prefill worker from outside. What does not: checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc

from pdserve.rpc import convert
from pdserve.rpc.convert import Heartbeat, JoinEvent, Register, WorkerState
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.types import WorkerRecord

PIECE_BYTES = 4096
BUFFER_BYTES = 1 << 16
BEAT_S = 0.2


class SlowProxy:
    """Relays to one TCP endpoint; what comes back may be slowed. A thread with an event loop of its own."""

    def __init__(self, target: str) -> None:
        """target: host:port to relay to."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._rate: float | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.endpoint = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def limit(self, bytes_per_s: float | None) -> None:
        """Slows each connection's answers to this rate from now on; None: as fast as can be."""
        self._loop.call_soon_threadsafe(self._set, bytes_per_s)

    def close(self) -> None:
        """Ends all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _set(self, rate: float | None) -> None:
        self._rate = rate
        self._changed.set()
        self._changed = asyncio.Event()

    async def _end(self) -> None:
        self._server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _listen(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0, limit=BUFFER_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target, limit=BUFFER_BYTES)
        ways = [
            asyncio.ensure_future(self._pump(reader, back, slow=False)),
            asyncio.ensure_future(self._pump(there, writer, slow=True)),
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the proxy is closed
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            back.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE_BYTES if slow and self._rate else BUFFER_BYTES):
                if slow and self._rate:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), len(data) / self._rate)
                target.write(data)
                await target.drain()


class StatusOf:
    """Asks a worker for its own status."""

    def __init__(self, control: str, secret: bytes) -> None:
        """control: host:port of the worker's gRPC."""
        self._channel = grpc.insecure_channel(control)
        self._stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(self._channel), secret)

    def state(self, *, check: bool = False) -> WorkerState:
        """Now. check: with the proof that the pool's pages add up, which takes the worker a while."""
        request = cluster_pb2.GetWorkerStatusRequest(no_integrity_check=not check)
        return convert.worker_state_from_pb(self._stub.GetWorkerStatus(request, timeout=30))

    def drain(self, timeout_s: float) -> cluster_pb2.DrainResponse:
        """Has it take nothing new, and waits until the rest is done, or for so many seconds."""
        return self._stub.Drain(cluster_pb2.DrainRequest(timeout_s=timeout_s), timeout=timeout_s + 30)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


class Sponsor:
    """Keeps a worker registered with a router in its place, with another address for its page server."""

    def __init__(self, router: str, worker: StatusOf, secret: bytes, *, tcp: str) -> None:
        """tcp: what the router is told instead of the worker's own."""
        self._worker = worker
        self._channel = grpc.insecure_channel(router)
        self._cluster = authenticated(cluster_pb2_grpc.ClusterServiceStub(self._channel), secret)
        self._over = threading.Event()
        record = worker.state().record
        self._record: WorkerRecord = replace(record, peer=replace(record.peer, tcp=tcp))
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the registration; the worker is not told."""
        self._over.set()
        self._channel.close()
        self._thread.join()

    def _keep(self) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):  # the channel was closed
            for answer in self._cluster.Join(self._events()):
                assert answer.accepted, answer.problem

    def _events(self) -> Iterator[cluster_pb2.JoinRequest]:
        event: JoinEvent = Register(record=self._record, monotonic_s=time.monotonic())
        yield convert.join_event_to_pb(event)
        while not self._over.wait(BEAT_S):
            event = Heartbeat(load=self._worker.state().load, monotonic_s=time.monotonic())
            yield convert.join_event_to_pb(event)
