"""The OpenTelemetry end of tracing: batches of finished spans to a collector, from a thread of its own.

Imported by `pdserve.obs.tracing.spans_of` alone, where an endpoint is configured. Whatever the collector
does, requests go on: spans wait in a bounded queue, and what does not fit there is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as OtelEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from pdserve import __version__
from pdserve.obs.tracing import FinishedSpan, Kind

EXPORT_TIMEOUT_S = 5
DELAY_S = 1.0
"""A span waits at most so long for others to be sent with it."""
_KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.INTERNAL: SpanKind.INTERNAL}
_NS = 10**9


class OtlpSpans:
    """This process's exporter. `add` from any thread."""

    def __init__(self, endpoint: str, *, service: str, instance: str, about: Mapping[str, str]) -> None:
        """Connects to nobody yet. Certificates and headers come from OpenTelemetry's own variables
        (OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_HEADERS), more resource attributes from
        OTEL_RESOURCE_ATTRIBUTES."""
        self._resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": "pdserve",
                "service.instance.id": instance,
                "service.version": __version__,
                **about,
            }
        )
        self._scope = InstrumentationScope("pdserve", __version__)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_S * 1000)

    def add(self, span: FinishedSpan) -> None:
        """See Spans."""
        if span.context.sampled:
            self._processor.on_end(self._readable(span))

    def close(self) -> None:
        """See Spans."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: FinishedSpan) -> ReadableSpan:
        context, parent = span.context, None
        if span.parent_id:
            parent = _context(context.trace_id, span.parent_id, context.state, remote=span.remote_parent)
        return ReadableSpan(
            name=span.name,
            context=_context(context.trace_id, context.span_id, context.state, remote=False),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[
                OtelEvent(event.name, dict(event.attributes), int(event.at_s * _NS)) for event in span.events
            ],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=int(span.begin_s * _NS),
            end_time=int(max(span.begin_s, span.end_s) * _NS),
            instrumentation_scope=self._scope,
        )


def _context(trace_id: str, span_id: str, state: str, *, remote: bool) -> SpanContext:
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([state]) if state else None,
    )
