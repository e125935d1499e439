"""The asyncio client. Use it from one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.api import Chunk, ExpertReport, Explanation, FleetStatus, ModelInfo, RebalanceAnswer
from pdserve.client.chat import Message
from pdserve.client.connect import TlsOptions, connections
from pdserve.client.request import (
    CONTROL_TIMEOUT_S,
    DEFAULT_ADDRESS,
    GRACE_S,
    PLAN_TIMEOUT_S,
    GenerateOptions,
    build,
    to_wire,
)
from pdserve.client.result import Collector, Result
from pdserve.errors import Cancelled
from pdserve.messages import Outcome

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")


class AsyncClient:
    """A connection to one router. Dials at the first call; close it, or use `async with`.

    Every call has a deadline. All methods raise the errors of pdserve.errors and no others.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **tls: Unpack[TlsOptions]) -> None:
        """address: host:port of the router. tls: see TlsOptions. Must be called in a running event loop.

        Raises ConfigError for certificates that can not be used.
        """
        from pdserve.rpc.channel import open_channel
        from pdserve.rpc.credentials import close_soon

        self._connections = connections(tls, lambda source: open_channel(address, tls=source), close_soon)

    @property
    def _stub(self) -> Any:
        return self._connections.current().stub

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Starts one completion of a prompt, a conversation or token ids. Raises InvalidRequest at once."""
        source = build(prompt, messages, token_ids, options)
        return AsyncStream(self._stub.Generate(to_wire(source), timeout=source.deadline_s + GRACE_S))

    async def abort(self, request_id: str) -> Outcome:
        """Ends a request by the id its stream has. UNKNOWN: the router does not remember it."""
        from pdserve.rpc.convert import outcome_from_pb
        from pdserve.rpc.v1.inference_pb2 import AbortRequest

        response = await _checked(
            self._stub.Abort(AbortRequest(request_id=request_id), timeout=CONTROL_TIMEOUT_S)
        )
        return outcome_from_pb(response.outcome)

    async def get_model(self, model: str = "") -> ModelInfo:
        """The model that is served. Raises Unavailable before the first worker has registered."""
        from pdserve.rpc.convert import model_info_from_pb
        from pdserve.rpc.v1.inference_pb2 import GetModelRequest

        request = GetModelRequest(model=model)
        return model_info_from_pb(await _checked(self._stub.GetModel(request, timeout=CONTROL_TIMEOUT_S)))

    async def get_status(self) -> FleetStatus:
        """The router's view of its fleet."""
        from pdserve.rpc.convert import fleet_status_from_pb
        from pdserve.rpc.v1.inference_pb2 import GetStatusRequest

        call = self._stub.GetStatus(GetStatusRequest(), timeout=CONTROL_TIMEOUT_S)
        return fleet_status_from_pb(await _checked(call))

    async def explain(self, request_id: str) -> Explanation:
        """Where a request's time went, or what it waits for. Raises UnknownRequest."""
        from pdserve.rpc.convert import explanation_from_pb
        from pdserve.rpc.v1.inference_pb2 import ExplainRequest

        call = self._stub.Explain(ExplainRequest(request_id=request_id), timeout=CONTROL_TIMEOUT_S)
        return explanation_from_pb(await _checked(call))

    async def get_experts(self, worker_id: str = "") -> tuple[ExpertReport, ...]:
        """How much experts are used and where they lie, of one worker or all. Raises Unavailable."""
        from pdserve.rpc.convert import expert_report_from_pb
        from pdserve.rpc.v1.inference_pb2 import GetExpertsRequest

        call = self._stub.GetExperts(GetExpertsRequest(worker_id=worker_id), timeout=CONTROL_TIMEOUT_S)
        return tuple(expert_report_from_pb(report) for report in (await _checked(call)).reports)

    async def rebalance_experts(self, worker_id: str = "") -> tuple[RebalanceAnswer, ...]:
        """Has one worker or all place their experts anew; returns once they have planned. Raises
        Unavailable."""
        from pdserve.rpc.convert import rebalance_answer_from_pb
        from pdserve.rpc.v1.inference_pb2 import RebalanceExpertsRequest

        request = RebalanceExpertsRequest(worker_id=worker_id)
        call = self._stub.RebalanceExperts(request, timeout=PLAN_TIMEOUT_S)
        return tuple(rebalance_answer_from_pb(answer) for answer in (await _checked(call)).answers)

    async def close(self) -> None:
        """Ends all calls."""
        for connection in self._connections.all():
            await connection.channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """One completion under way: iterate over its chunks, or await `result`. Leaving it unfinished cancels."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._collected = Collector()
        self._events = self._read()

    @property
    def request_id(self) -> str | None:
        """The id to abort it by; None until the router has admitted it."""
        return self._collected.admitted.request_id if self._collected.admitted is not None else None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._events

    async def result(self) -> Result:
        """Waits for the end and gives the whole answer, whatever part of it was iterated over before."""
        async for _ in self._events:
            pass
        return self._collected.result()

    def cancel(self) -> None:
        """Ends the request; iterating then raises Cancelled. No effect once it has ended."""
        self._call.cancel()

    async def _read(self) -> AsyncIterator[Chunk]:
        import asyncio

        import grpc

        from pdserve.rpc.convert import stream_event_from_pb
        from pdserve.rpc.status import error_from_rpc

        try:
            async for message in self._call:
                chunk = self._collected.take(stream_event_from_pb(message))
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("The request was cancelled.") from None
        finally:
            self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


async def _checked(call: Awaitable[T]) -> T:
    import grpc

    from pdserve.rpc.status import error_from_rpc

    try:
        return await call
    except grpc.RpcError as error:
        raise error_from_rpc(error) from None
