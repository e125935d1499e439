"""The OpenTelemetry end of tracing: batches of finished spans to a collector, from a thread of its own.

Imported by `pdserve.obs.tracing.spans_of` alone, where an endpoint is configured. Whatever the collector
does, requests go on: spans wait in a bounded queue, and what does not fit there is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from pdserve import __version__
from pdserve.obs.tracing import LEDGER, FinishedSpan, Kind, told_of

EXPORT_TIMEOUT_S = 3
CLOSE_S = 3.0
"""How long a process that ends waits for a collector that does not answer."""
DELAY_S = 1.0
"""A span waits at most so long for others to be sent with it."""
_KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.INTERNAL: SpanKind.INTERNAL}
_NS = 10**9


class OtlpSpans:
    """This process's exporter: `pdserve.obs.tracing.Spans`."""

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
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
        self._processor = BatchSpanProcessor(self._exporter, schedule_delay_millis=DELAY_S * 1000)

    def add(self, span: FinishedSpan) -> None:
        """See Spans."""
        if span.context.sampled:
            self._processor.on_end(_Waiting(span, self._resource))

    def close(self) -> None:
        """See Spans."""
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        self._exporter.give_up()


class _Waiting(ReadableSpan):
    """A span in the queue. What it says is put into OpenTelemetry's form by the thread that sends it: that
    takes longer than all the rest."""

    def __init__(self, span: FinishedSpan, resource: Resource) -> None:
        """resource: the process's; without one the base class would look for it, each time."""
        of, own = span.context, span.context.span_id
        super().__init__(span.name, _context(of.trace_id, own, of.state, remote=False), resource=resource)
        self.finished = span


class _Exporter(SpanExporter):
    """Sends what waits. The processor's thread alone calls it."""

    def __init__(self, inner: OTLPSpanExporter) -> None:
        self._inner = inner
        self._scope = InstrumentationScope("pdserve", __version__)
        self._given_up = False

    def give_up(self) -> None:
        """Sends nothing from now on. Any thread."""
        self._given_up = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        if self._given_up:
            return SpanExportResult.FAILURE
        return self._inner.export([self._whole(span) for span in spans if isinstance(span, _Waiting)])

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._inner.shutdown()

    def _whole(self, waiting: _Waiting) -> ReadableSpan:
        span, parent = waiting.finished, None
        context = span.context
        if span.parent_id:
            parent = _context(context.trace_id, span.parent_id, context.state, remote=span.remote_parent)
        return ReadableSpan(
            name=span.name,
            context=waiting.context,
            parent=parent,
            resource=waiting.resource,
            attributes=span.attributes,
            events=[
                Event(f"{LEDGER}{each.phase}", told_of(each), int((span.zero_s + each.begin_s) * _NS))
                for each in span.stretches
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
