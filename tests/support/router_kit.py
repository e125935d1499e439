"""A router in this process with scripted workers around it, all over real gRPC.

The workers here are test doubles of the router's peers: they speak DecodeService, PrefillService,
WorkerService and Join, and make tokens by the formula of `byte_model`. Not here: pages, engines, and what is
expected of the router.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import AsyncClient, ExpertReport
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest
from pdserve.messages import (
    Ended,
    Outcome,
    Prefilled,
    PrefillRequest,
    Refusal,
    Refused,
    Reserve,
    Reserved,
    Token,
)
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.rpc.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from pdserve.types import (
    CapabilityRecord,
    FinishReason,
    Key,
    Ledger,
    ModelLimits,
    PeerRef,
    Role,
    TransferStats,
    Usage,
    WorkerLoad,
    WorkerRecord,
)
from router.config import RouterConfig
from router.main import Router
from router.service import INFERENCE
from tests.support.byte_model import CONTEXT, END_ID, PAGE, VOCAB, byte_bundle, next_token

SECRET = bytes(range(32))

DecodeScript = Callable[[Reserve], AsyncIterator[convert.DecodeEvent]]
PrefillScript = Callable[[PrefillRequest], Awaitable[convert.PrefillResult]]


@dataclass
class _Live:
    stop: asyncio.Event = field(default_factory=asyncio.Event)


class FakeWorker(
    decode_pb2_grpc.DecodeServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    cluster_pb2_grpc.WorkerServiceServicer,
):
    """A worker of any role. What it was told is in `reserves`, `prefills` and, in order, in `seen`; what came
    beside them in `metadata`.

    pause_at: before this completion index the stream waits for `gate`. The scripts take over.
    """

    def __init__(self, worker_id: str, role: Role, **record: Any) -> None:
        self.worker_id, self.role = worker_id, role
        self.incarnation = secrets.randbits(63) | 1
        self.reserves: list[Reserve] = []
        self.prefills: list[PrefillRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.seen: asyncio.Queue[tuple[str, Key]] = asyncio.Queue()
        self.pause_at: int | None = None
        self.gate = asyncio.Event()
        self.decode_script: DecodeScript = self.decode
        self.prefill_script: PrefillScript = self.prefill
        self.ends_at: int | None = None
        self.switch_outcome = Outcome.STOPPING
        self.experts: ExpertReport | None = None
        self._record_changes = record
        self._live: dict[Key, _Live] = {}
        self._server = RpcServer(ServerOptions())
        self._join: Any = None
        self._channel: Any = None

    # -- the worker's own life -------------------------------------------------------------------------

    async def start(self) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server.server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server.server)
        cluster_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.server)
        await self._server.start()

    @property
    def record(self) -> WorkerRecord:
        bundle = byte_bundle()
        peer = PeerRef(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            control=self._server.address,
            host_id="here",
        )
        capability = CapabilityRecord(
            layout=self._record_changes.get("layout", "layout"),
            numerics="float32",
            model=self._record_changes.get("model", "model"),
            tokenizer=bundle.digest,
            dtype="float32",
            page_size=PAGE,
            page_bytes=4096,
            transports=("tcp",),
        )
        return WorkerRecord(
            peer=peer,
            role=self.role,
            capability=capability,
            limits=ModelLimits(
                vocab_size=VOCAB, max_context=CONTEXT, end_token_ids=(END_ID,), bos_token_id=None
            ),
            model_name="bytes",
            pool_pages=self._record_changes.get("pool_pages", 1024),
            page_size=PAGE,
            metrics=self._record_changes.get("metrics", ""),
        )

    async def join(self, address: str, *, monotonic_s: float = 1000.0) -> convert.JoinAnswer:
        """Registers on a new Join stream."""
        if self._channel is None:
            self._channel = open_channel(address)
        stub = authenticated(cluster_pb2_grpc.ClusterServiceStub(self._channel), SECRET)
        self._join = stub.Join()
        return await self._say(convert.Register(record=self.record, monotonic_s=monotonic_s))

    async def beat(self, load: WorkerLoad | None = None, monotonic_s: float = 1000.0) -> convert.JoinAnswer:
        """One heartbeat."""
        return await self._say(convert.Heartbeat(load=load or WorkerLoad(), monotonic_s=monotonic_s))

    async def _say(self, event: convert.JoinEvent) -> convert.JoinAnswer:
        await self._join.write(convert.join_event_to_pb(event))
        return convert.join_answer_from_pb(await self._join.read())

    async def leave(self) -> None:
        """Says goodbye; returns when the router has ended the stream."""
        await self._join.write(convert.join_event_to_pb(convert.Leave(reason="test")))
        assert await self._join.read() is grpc.aio.EOF

    async def kill(self) -> None:
        """As if the process died: every connection breaks."""
        if self._join is not None:
            self._join.cancel()
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None
        await self._server.stop(0)

    async def wait_for(self, what: str) -> Key:
        """The key of the next thing of this kind that the router did, skipping others."""
        async with asyncio.timeout(10):
            while True:
                name, key = await self.seen.get()
                if name == what:
                    return key

    # -- decode ------------------------------------------------------------------------------------------

    async def decode(self, call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        """Reserved, tokens, Ended; a cancel ends it between two tokens."""
        stop = self._live.setdefault(call.key, _Live()).stop
        yield Reserved(key=call.key, mode=call.mode, hit_tokens=0)
        ids = list(call.token_ids)
        for index in range(call.num_forced, call.sampling.max_tokens):
            if index == self.pause_at:
                self.seen.put_nowait(("paused", call.key))
                await _either(self.gate, stop)
            if stop.is_set():
                yield self.ended(call, len(ids), label="cancelled")
                return
            token = END_ID if index == self.ends_at else next_token(ids)
            ids.append(token)
            yield Token(key=call.key, index=index, token_id=token)
            if token == END_ID:
                yield self.ended(call, len(ids), finish=FinishReason.STOP)
                return
        yield self.ended(call, len(ids), finish=FinishReason.LENGTH)

    def ended(
        self, call: Reserve, num_ids: int, *, finish: FinishReason | None = None, label: str = ""
    ) -> Ended:
        num_prompt = len(call.token_ids) - call.num_forced
        usage = Usage(prompt_tokens=num_prompt, cached_tokens=0, completion_tokens=num_ids - num_prompt)
        pages = -(-len(call.token_ids) // PAGE) if call.prefill is not None else 0
        ledger = Ledger(
            prefill_worker=call.prefill.worker_id if call.prefill is not None else "",
            decode_worker=self.worker_id,
            prefill_computed_tokens=len(call.token_ids) if call.prefill is not None else 0,
            decode_computed_prompt_tokens=0 if call.prefill is not None else len(call.token_ids),
            transfer=TransferStats(path="tcp" if pages else "", pages=pages, bytes=pages * 4096),
        )
        return Ended(
            key=call.key, finish=finish, error_label=label, error_message="ended" if label else "",
            usage=usage, ledger=ledger,
        )  # fmt: skip

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> None:  # noqa: N802
        call = convert.reserve_from_pb(request)
        assert call.receiver_incarnation == self.incarnation
        self.reserves.append(call)
        self.metadata.append(dict(context.invocation_metadata()))
        self._live.setdefault(call.key, _Live())
        self.seen.put_nowait(("reserve", call.key))
        try:
            async for event in self.decode_script(call):
                await context.write(convert.decode_event_to_pb(event))
        except asyncio.CancelledError:
            self.seen.put_nowait(("reserve_broken", call.key))
            raise

    async def CancelDecode(  # noqa: N802
        self, request: decode_pb2.CancelDecodeRequest, context: Any
    ) -> decode_pb2.CancelDecodeResponse:
        key = convert.key_from_pb(request.key)
        self._live.setdefault(key, _Live()).stop.set()
        self.seen.put_nowait(("cancel_decode", key))
        return decode_pb2.CancelDecodeResponse(outcome=convert.outcome_to_pb(Outcome.STOPPING))

    async def SwitchLocal(  # noqa: N802
        self, request: decode_pb2.SwitchLocalRequest, context: Any
    ) -> decode_pb2.SwitchLocalResponse:
        self.seen.put_nowait(("switch", convert.key_from_pb(request.key)))
        return decode_pb2.SwitchLocalResponse(outcome=convert.outcome_to_pb(self.switch_outcome))

    # -- prefill -----------------------------------------------------------------------------------------

    async def prefill(self, call: PrefillRequest) -> convert.PrefillResult:
        """Says at once that the handover is complete."""
        ledger = Ledger(prefill_worker=self.worker_id, prefill_computed_tokens=len(call.token_ids))
        return Prefilled(key=call.key, outcome=Outcome.COMPLETE, ledger=ledger)

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> prefill_pb2.PrefillResponse:
        call = convert.prefill_from_pb(request)
        assert call.receiver_incarnation == self.incarnation
        self.prefills.append(call)
        self.metadata.append(dict(context.invocation_metadata()))
        self.seen.put_nowait(("prefill", call.key))
        return convert.prefill_result_to_pb(await self.prefill_script(call))

    async def CancelPrefill(  # noqa: N802
        self, request: prefill_pb2.CancelPrefillRequest, context: Any
    ) -> prefill_pb2.CancelPrefillResponse:
        self.seen.put_nowait(("cancel_prefill", convert.key_from_pb(request.key)))
        return prefill_pb2.CancelPrefillResponse(outcome=convert.outcome_to_pb(Outcome.STOPPING))

    # -- worker ------------------------------------------------------------------------------------------

    async def FetchTokenizer(  # noqa: N802
        self, request: cluster_pb2.FetchTokenizerRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.FetchTokenizerResponse]:
        data = byte_bundle().to_bytes()
        for start in range(0, len(data), 1000):
            part = data[start : start + 1000]
            yield cluster_pb2.FetchTokenizerResponse(chunk=part, total_bytes=len(data))

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetWorkerStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetWorkerExperts(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.experts is None:
            raise InvalidRequest("This worker does not tell.")
        return cluster_pb2.GetWorkerExpertsResponse(report=convert.expert_report_to_pb(self.experts))


def refuses(reason: Refusal, times: int = 1, retry_after_s: float = 0.0) -> Callable[[FakeWorker], None]:
    """Makes a worker refuse its next `times` Reserves."""

    def change(worker: FakeWorker) -> None:
        left = [times]

        async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
            if left[0]:
                left[0] -= 1
                yield Refused(key=call.key, reason=reason, retry_after_s=retry_after_s)
                return
            async for event in worker.decode(call):
                yield event

        worker.decode_script = script

    return change


async def never(call: PrefillRequest) -> convert.PrefillResult:
    """A prefill that does not end by itself."""
    await asyncio.Event().wait()
    raise AssertionError


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(one.wait()), asyncio.ensure_future(other.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@dataclass
class Fleet:
    """A running router and its client."""

    router: Router
    client: AsyncClient


async def until_ready(address: str, *, ready: bool = True) -> None:
    """Waits until the router's health says that inference is (not) served."""
    wanted = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    channel = open_channel(address)
    try:
        async with asyncio.timeout(10):
            request = health_pb2.HealthCheckRequest(service=INFERENCE)
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                if answer.status == wanted:
                    return
    finally:
        await channel.close(None)


@asynccontextmanager
async def fleet(*workers: FakeWorker, clock: Clock | None = None, **config: Any) -> AsyncIterator[Fleet]:
    """A router with these workers registered, ready to serve if one of them can decode."""
    values: dict[str, Any] = {
        "suspect_after_s": 600.0,
        "heartbeat_timeout_s": 600.0,
        "metrics": False,
        "http": False,
    } | config
    router = Router(
        RouterConfig(port=0, metrics_port=0, http_port=0, fleet_secret=SECRET.hex(), **values), clock
    )
    await router.start()
    client = AsyncClient(router.address, retry=None)  # a test sees what the router says
    try:
        for worker in workers:
            await worker.start()
            assert (await worker.join(router.address)).accepted
        if any(worker.role is not Role.PREFILL for worker in workers):
            await until_ready(router.address)
        yield Fleet(router, client)
    finally:
        await client.close()
        await router.stop()
        for worker in workers:
            with suppress(Exception):
                await worker.kill()
