"""One gRPC channel per worker incarnation, with its stubs. What is said over them is others' business."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc.aio

from pdserve.rpc.channel import open_channel
from pdserve.rpc.credentials import Renewing, close_soon
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2_grpc, decode_pb2_grpc, evaluate_pb2_grpc, prefill_pb2_grpc
from pdserve.tls import TlsSource
from pdserve.types import WorkerRecord


class _Stubs:
    """A channel and its stubs."""

    def __init__(self, channel: grpc.aio.Channel, secret: bytes) -> None:
        self.channel = channel
        self.decode = authenticated(decode_pb2_grpc.DecodeServiceStub(channel), secret)
        self.prefill = authenticated(prefill_pb2_grpc.PrefillServiceStub(channel), secret)
        self.evaluate = authenticated(evaluate_pb2_grpc.EvaluateServiceStub(channel), secret)
        self.worker = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), secret)


class WorkerLink:
    """The channel to one incarnation of a worker."""

    def __init__(self, record: WorkerRecord, secret: bytes, tls: TlsSource | None = None) -> None:
        """tls: our certificate; new calls use it as it is when they start."""
        self.record = record
        self._stubs = Renewing(
            tls,
            lambda: _Stubs(open_channel(record.peer.control, tls=tls), secret),
            lambda stubs: close_soon(stubs.channel),
        )

    @property
    def decode(self) -> decode_pb2_grpc.DecodeServiceAsyncStub:
        return self._stubs.current().decode

    @property
    def prefill(self) -> prefill_pb2_grpc.PrefillServiceAsyncStub:
        return self._stubs.current().prefill

    @property
    def evaluate(self) -> evaluate_pb2_grpc.EvaluateServiceAsyncStub:
        return self._stubs.current().evaluate

    @property
    def worker(self) -> cluster_pb2_grpc.WorkerServiceAsyncStub:
        return self._stubs.current().worker

    async def close(self) -> None:
        """Ends all calls on it."""
        await asyncio.gather(*(stubs.channel.close(None) for stubs in self._stubs.all()))


class Links:
    """Links by incarnation. Owned by the event loop."""

    def __init__(self, secret: bytes, tls: TlsSource | None = None) -> None:
        """secret: the fleet's. tls: our certificate."""
        self._secret, self._tls = secret, tls
        self._links: dict[int, WorkerLink] = {}

    def open(self, record: WorkerRecord) -> WorkerLink:
        """The link to this incarnation; a new one if there is none. Its address never changes."""
        link = self._links.get(record.peer.incarnation)
        if link is None:
            link = self._links[record.peer.incarnation] = WorkerLink(record, self._secret, self._tls)
        return link

    def get(self, incarnation: int) -> WorkerLink | None:
        return self._links.get(incarnation)

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter(tuple(self._links.values()))

    def take(self, incarnation: int) -> WorkerLink | None:
        """Forgets a link at once, so that a new registration gets a new one; the caller closes it."""
        return self._links.pop(incarnation, None)

    async def close(self, incarnation: int) -> None:
        """Closes a link, if there is one."""
        link = self.take(incarnation)
        if link is not None:
            await link.close()

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(link.record.peer.incarnation) for link in self))
