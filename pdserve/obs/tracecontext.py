"""W3C Trace Context: which trace a request belongs to, read from and written to headers.

What lives here: `traceparent` and `tracestate` (https://www.w3.org/TR/trace-context/), and the decision
whether a new trace is recorded. What does not: spans and where they go (`pdserve.obs.tracing`). Pure but for
new ids; needs no OpenTelemetry.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS, MAX_STATE_MEMBERS = 512, 32
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_SAMPLED = 0x01
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_IDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """One span of one trace. trace_id, span_id: 32 and 16 lower-case hex digits. sampled: whether whoever
    began the trace records it. state: `tracestate` as it came, for other vendors' sake."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return replace(self, span_id=new_span_id())

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What makes a callee's spans children of this one, as headers or gRPC metadata."""
        parent = (TRACEPARENT, f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}")
        return (parent, (TRACESTATE, self.state)) if self.state else (parent,)


PARENT: ContextVar[TraceContext | None] = ContextVar("trace_parent", default=None)
"""Of the call that is served: the client's span. What lets callers in sets it."""


def parent_of(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """The caller's span as its headers or metadata name it (lower-case names); None without one, or if it is
    not well formed: a trace is no reason to refuse a request."""
    parents: list[str] = []
    states: list[str] = []
    for name, value in headers:
        if name in (TRACEPARENT, TRACESTATE):
            text = value if isinstance(value, str) else value.decode("latin-1")
            (parents if name == TRACEPARENT else states).append(text.strip())
    if len(parents) != 1:
        return None
    found = _PARENT.fullmatch(parents[0])
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    later = version != "00"  # a later version may say more; what is known of it still holds
    if version == "ff" or (more and not later) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id=trace_id, span_id=span_id, sampled=sampled, state=_state(states))


def _state(states: list[str]) -> str:
    """As it came, or "" where a member is not well formed: OpenTelemetry would log what it holds."""
    state = ",".join(each for each in states if each)
    if len(state) > MAX_STATE_CHARS:
        return ""
    members = [member for each in state.split(",") if (member := each.strip(" \t"))]
    well = len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if well else ""


def new_trace(ratio: float, trace_id: str = "") -> TraceContext:
    """A trace that begins here. trace_id: the one asked for, if it is one. ratio: share of traces that are
    recorded; which ones depends on the id alone, so that all routers decide alike (as OpenTelemetry's
    TraceIdRatioBased does)."""
    if trace_id == _NO_TRACE or not _TRACE_ID.fullmatch(trace_id):
        trace_id = secrets.token_hex(16)
    sampled = int(trace_id[16:], 16) < round(ratio * _IDS)
    return TraceContext(trace_id=trace_id, span_id=new_span_id(), sampled=sampled)


def new_span_id() -> str:
    """Random and not zero, which stands for none."""
    return f"{secrets.randbelow(_IDS - 1) + 1:016x}"
