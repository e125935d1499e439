"""A collector of spans in this process: OTLP over gRPC as its protocol says. Not here: what is expected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

LIMIT_S = 60.0


@dataclass(frozen=True)
class Collected:
    """A span as it came, with its process's attributes."""

    span: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return plain(self.span.attributes)

    @property
    def times_s(self) -> tuple[float, float]:
        return self.span.start_time_unix_nano / 1e9, self.span.end_time_unix_nano / 1e9


class Collector(service_pb2_grpc.TraceServiceServicer):
    """Keeps every span it is sent."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self.address = ""
        self._came = threading.Condition()

    def Export(  # noqa: N802
        self, request: service_pb2.ExportTraceServiceRequest, context: Any
    ) -> service_pb2.ExportTraceServiceResponse:
        with self._came:
            for resource in request.resource_spans:
                about = plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans += [Collected(span, about) for span in scope.spans]
            self._came.notify_all()
        return service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, count: int) -> list[Collected]:
        """The spans of a trace, by their begin, once there are so many."""
        self.until(lambda: len(self._of(trace_id)) >= count)
        return self._of(trace_id)

    def until(self, wanted: Callable[[], bool]) -> None:
        """Waits until what came is as wanted."""
        with self._came:
            assert self._came.wait_for(wanted, LIMIT_S), [(s.service, s.name) for s in self.spans]

    def _of(self, trace_id: str) -> list[Collected]:
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda s: s.times_s)


@contextmanager
def collector(found: Collector | None = None) -> Iterator[Collector]:
    """A running one, this one if it is given; its address is the endpoint to configure."""
    found = found or Collector()
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
        found.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield found
        finally:
            server.stop(None).wait()


def plain(pairs: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
