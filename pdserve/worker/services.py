"""What every worker serves besides its roles: tokenizer download, drain, status."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from grpc.aio import ServicerContext

from pdserve.api import ExpertReport, RebalanceAnswer
from pdserve.errors import InvalidRequest
from pdserve.messages import Report
from pdserve.rpc import convert
from pdserve.rpc.convert import WorkerState
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.types import Key

CHUNK_BYTES = 1 << 20
MAX_DRAIN_S = 3600.0
SERVICE = "pdserve.rpc.v1.WorkerService"
Context = ServicerContext[Any, Any]


class WorkerServicer(cluster_pb2_grpc.WorkerServiceServicer):
    """WorkerService on the control thread."""

    def __init__(
        self,
        bundle: TokenizerBundle,
        state: Callable[[bool], WorkerState],
        drain: Callable[[float], Awaitable[int]],
        report: Callable[[Key], Report | None],
        experts: Callable[[], ExpertReport],
        rebalance: Callable[[], Awaitable[RebalanceAnswer]],
    ) -> None:
        """state takes whether to prove the pool's integrity. drain takes a time limit in seconds and returns
        how many are left. report: for GetRequest. experts: for GetWorkerExperts. rebalance:
        for RebalanceWorkerExperts."""
        self._digest = bundle.digest
        self._bytes = bundle.to_bytes()
        self._state = state
        self._drain = drain
        self._report = report
        self._experts = experts
        self._rebalance = rebalance

    async def FetchTokenizer(  # noqa: N802
        self, request: cluster_pb2.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.FetchTokenizerResponse]:
        """The bundle in chunks. Raises InvalidRequest for another digest."""
        if request.digest != self._digest:
            raise InvalidRequest.field("digest", "this worker has another tokenizer")
        total = len(self._bytes)
        for start in range(0, total, CHUNK_BYTES):
            chunk = self._bytes[start : start + CHUNK_BYTES]
            yield cluster_pb2.FetchTokenizerResponse(chunk=chunk, total_bytes=total)

    async def Drain(  # noqa: N802
        self, request: cluster_pb2.DrainRequest, context: Context
    ) -> cluster_pb2.DrainResponse:
        """Refuses new requests at once and waits until live ones are done, up to the limit."""
        if not 0 <= request.timeout_s <= MAX_DRAIN_S:
            raise InvalidRequest.field("timeout_s", f"must be between 0 and {MAX_DRAIN_S:.0f} seconds")
        remaining = await self._drain(request.timeout_s)
        return cluster_pb2.DrainResponse(drained=remaining == 0, remaining=remaining)

    async def GetRequest(  # noqa: N802
        self, request: cluster_pb2.GetRequestRequest, context: Context
    ) -> cluster_pb2.GetRequestResponse:
        """What this worker knows of a live key."""
        return convert.report_to_pb(self._report(convert.key_from_pb(request.key)))

    async def GetWorkerStatus(  # noqa: N802
        self, request: cluster_pb2.GetWorkerStatusRequest, context: Context
    ) -> cluster_pb2.GetWorkerStatusResponse:
        """The worker's record, load and integrity."""
        return convert.worker_state_to_pb(self._state(not request.no_integrity_check))

    async def GetWorkerExperts(  # noqa: N802
        self, request: cluster_pb2.GetWorkerExpertsRequest, context: Context
    ) -> cluster_pb2.GetWorkerExpertsResponse:
        """Loads and homes of experts; no layers for a model without any."""
        return cluster_pb2.GetWorkerExpertsResponse(report=convert.expert_report_to_pb(self._experts()))

    async def RebalanceWorkerExperts(  # noqa: N802
        self, request: cluster_pb2.RebalanceWorkerExpertsRequest, context: Context
    ) -> cluster_pb2.RebalanceWorkerExpertsResponse:
        """Whether experts begin to move, and what that gains."""
        answer = convert.rebalance_answer_to_pb(await self._rebalance())
        return cluster_pb2.RebalanceWorkerExpertsResponse(answer=answer)
