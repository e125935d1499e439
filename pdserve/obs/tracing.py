"""Finished spans on their way to a collector (OTLP over gRPC). OpenTelemetry is imported only when asked for.

What lives here: spans as data, and the exporter with its thread. What does not: what a span says
(`router.record`, `pdserve.obs.work`), and whose trace it is (`pdserve.obs.tracecontext`).

Spans are made when their work is over, of stamps that the ledger has anyway: a request under way costs
nothing but its ids.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pdserve import clock
from pdserve.config.telemetry import TelemetrySettings
from pdserve.errors import ConfigError
from pdserve.obs.tracecontext import TraceContext
from pdserve.types import Span

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

SCHEMES = ("http://", "https://")
LEDGER = "pdserve.ledger."
"""Before a phase's name in the name of its event."""


class Kind(StrEnum):
    """SERVER: answers a call; INTERNAL: a part of such work."""

    SERVER = "server"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSpan:
    """One span. context: its own. parent_id: of the span it belongs to, "" for a trace's first.
    remote_parent: that one is another process's. begin_s, end_s: since 1970. error: a label, "" for none.
    stretches: of the ledger, told as events; zero_s: what their stamps count from, since 1970."""

    name: str
    kind: Kind
    context: TraceContext
    parent_id: str
    remote_parent: bool
    begin_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    stretches: Sequence[Span] = ()
    zero_s: float = 0.0


class Spans(Protocol):
    """Where finished spans go."""

    def add(self, span: FinishedSpan) -> None:
        """Takes a span of a sampled trace; leaves others out. Never blocks; from any thread."""
        ...

    def close(self) -> None:
        """Sends what waits, for a few seconds at most. Blocks. Safe to call twice."""
        ...


class WallClock:
    """Turns stamps of this process's monotonic clock into seconds since 1970, as they are now. Between two
    looks a thread may have to wait: the closest pair of a few counts."""

    def __init__(self) -> None:
        looks = [(clock.monotonic(), time.time(), clock.monotonic()) for _ in range(3)]
        before, now, after = min(looks, key=lambda look: look[2] - look[0])
        self._offset_s = now - (before + after) / 2

    def at(self, monotonic_s: float) -> float:
        """Seconds since 1970."""
        return self._offset_s + monotonic_s


def spans_of(settings: TelemetrySettings, service: str, instance: str, **about: str) -> Spans | None:
    """Where this process's spans go; None where tracing is off. service, instance, about: attributes of the
    process in all of them. Raises ConfigError if the endpoint can not be, or the extra otel is missing."""
    endpoint = settings.otlp_endpoint
    if not endpoint:
        return None
    if not endpoint.startswith(SCHEMES):
        raise ConfigError("otlp_endpoint: begins with http:// or https://, such as http://127.0.0.1:4317")
    try:
        from pdserve.obs.otlp import OtlpSpans
    except ImportError:
        raise ConfigError("otlp_endpoint: spans need the extra otel: pip install 'pdserve[otel]'") from None
    return OtlpSpans(endpoint, service=service, instance=instance, about=about)


def told_of(span: Span) -> dict[str, Value]:
    """A ledger's stretch as an event's attributes."""
    attributes: dict[str, Value] = {"pdserve.duration_s": span.end_s - span.begin_s}
    if span.on_path:
        attributes["pdserve.on_path"] = True
    if span.count:
        attributes["pdserve.count"] = span.count
    if span.sum_s:
        attributes["pdserve.sum_s"] = span.sum_s
    if span.begin_clock:
        attributes["pdserve.begin_clock"] = span.begin_clock
    if span.end_clock:
        attributes["pdserve.end_clock"] = span.end_clock
    return attributes
