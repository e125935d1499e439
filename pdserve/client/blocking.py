"""The blocking client. May be used from several threads; each stream from one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
from pdserve.messages import Outcome

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")


class Client:
    """A connection to one router. Dials at the first call; close it, or use `with`.

    Every call has a deadline. All methods raise the errors of pdserve.errors and no others.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **tls: Unpack[TlsOptions]) -> None:
        """address: host:port of the router. tls: see TlsOptions. Raises ConfigError for certificates that
        can not be used."""
        from pdserve.rpc.channel import open_blocking_channel

        self._lock = threading.Lock()
        self._connections = connections(
            tls,
            lambda source: open_blocking_channel(address, tls=source),
            lambda channel: channel.close(),
        )

    @property
    def _stub(self) -> Any:
        with self._lock:
            return self._connections.current().stub

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Starts one completion of a prompt, a conversation or token ids. Raises InvalidRequest at once."""
        source = build(prompt, messages, token_ids, options)
        request, timeout_s = to_wire(source), source.deadline_s + GRACE_S
        return Stream(_checked(lambda: self._stub.Generate(request, timeout=timeout_s)))

    def abort(self, request_id: str) -> Outcome:
        """Ends a request by the id its stream has. UNKNOWN: the router does not remember it."""
        from pdserve.rpc.convert import outcome_from_pb
        from pdserve.rpc.v1.inference_pb2 import AbortRequest

        request = AbortRequest(request_id=request_id)
        response = _checked(lambda: self._stub.Abort(request, timeout=CONTROL_TIMEOUT_S))
        return outcome_from_pb(response.outcome)

    def get_model(self, model: str = "") -> ModelInfo:
        """The model that is served. Raises Unavailable before the first worker has registered."""
        from pdserve.rpc.convert import model_info_from_pb
        from pdserve.rpc.v1.inference_pb2 import GetModelRequest

        request = GetModelRequest(model=model)
        return model_info_from_pb(_checked(lambda: self._stub.GetModel(request, timeout=CONTROL_TIMEOUT_S)))

    def get_status(self) -> FleetStatus:
        """The router's view of its fleet."""
        from pdserve.rpc.convert import fleet_status_from_pb
        from pdserve.rpc.v1.inference_pb2 import GetStatusRequest

        request = GetStatusRequest()
        return fleet_status_from_pb(
            _checked(lambda: self._stub.GetStatus(request, timeout=CONTROL_TIMEOUT_S))
        )

    def explain(self, request_id: str) -> Explanation:
        """Where a request's time went, or what it waits for. Raises UnknownRequest."""
        from pdserve.rpc.convert import explanation_from_pb
        from pdserve.rpc.v1.inference_pb2 import ExplainRequest

        request = ExplainRequest(request_id=request_id)
        return explanation_from_pb(_checked(lambda: self._stub.Explain(request, timeout=CONTROL_TIMEOUT_S)))

    def get_experts(self, worker_id: str = "") -> tuple[ExpertReport, ...]:
        """How much experts are used and where they lie, of one worker or all. Raises Unavailable."""
        from pdserve.rpc.convert import expert_report_from_pb
        from pdserve.rpc.v1.inference_pb2 import GetExpertsRequest

        request = GetExpertsRequest(worker_id=worker_id)
        response = _checked(lambda: self._stub.GetExperts(request, timeout=CONTROL_TIMEOUT_S))
        return tuple(expert_report_from_pb(report) for report in response.reports)

    def rebalance_experts(self, worker_id: str = "") -> tuple[RebalanceAnswer, ...]:
        """Has one worker or all place their experts anew; returns once they have planned. Raises
        Unavailable."""
        from pdserve.rpc.convert import rebalance_answer_from_pb
        from pdserve.rpc.v1.inference_pb2 import RebalanceExpertsRequest

        request = RebalanceExpertsRequest(worker_id=worker_id)
        response = _checked(lambda: self._stub.RebalanceExperts(request, timeout=PLAN_TIMEOUT_S))
        return tuple(rebalance_answer_from_pb(answer) for answer in response.answers)

    def close(self) -> None:
        """Ends all calls."""
        with self._lock:
            for connection in self._connections.all():
                connection.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """One completion under way: iterate over its chunks, or call `result`. Leaving it unfinished cancels."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._collected = Collector()
        self._events = self._read()

    @property
    def request_id(self) -> str | None:
        """The id to abort it by; None until the router has admitted it."""
        return self._collected.admitted.request_id if self._collected.admitted is not None else None

    def __iter__(self) -> Iterator[Chunk]:
        return self._events

    def result(self) -> Result:
        """Waits for the end and gives the whole answer, whatever part of it was iterated over before."""
        for _ in self._events:
            pass
        return self._collected.result()

    def cancel(self) -> None:
        """Ends the request, from any thread; iterating then raises Cancelled. No effect once it has ended."""
        self._call.cancel()

    def _read(self) -> Iterator[Chunk]:
        import grpc

        from pdserve.rpc.convert import stream_event_from_pb
        from pdserve.rpc.status import error_from_rpc

        try:
            for message in self._call:
                chunk = self._collected.take(stream_event_from_pb(message))
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _checked(call: Callable[[], T]) -> T:
    import grpc

    from pdserve.errors import Unavailable
    from pdserve.rpc.status import error_from_rpc

    try:
        return call()
    except grpc.RpcError as error:
        raise error_from_rpc(error) from None
    except ValueError:  # what grpc raises on a closed channel
        raise Unavailable("The client is closed.") from None
