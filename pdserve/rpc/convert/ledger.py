"""The latency ledger: spans, clock offsets and the figures beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from pdserve.errors import InvalidRequest
from pdserve.rpc.v1 import common_pb2 as pb
from pdserve.types import ClockOffset, Ledger, Phase, Span, TransferStats

_PHASE: Mapping[Phase, pb.Phase.ValueType] = {p: pb.Phase.Value(f"PHASE_{p.name}") for p in Phase}
_PHASE_BACK = {int(number): phase for phase, number in _PHASE.items()}
_OPTIONAL = ("ttft_s", "residual_s", "handover_s", "wire_hidden")
_NESTED = ("transfer", "spans", "clocks")
_PLAIN = tuple(f.name for f in fields(Ledger) if f.name not in (*_OPTIONAL, *_NESTED))
_SPAN = tuple(f.name for f in fields(Span) if f.name != "phase")
_CLOCK = tuple(f.name for f in fields(ClockOffset))


def transfer_stats_to_pb(value: TransferStats) -> pb.TransferStats:
    return pb.TransferStats(**{f.name: getattr(value, f.name) for f in fields(TransferStats)})


def transfer_stats_from_pb(message: pb.TransferStats) -> TransferStats:
    return TransferStats(**{f.name: getattr(message, f.name) for f in fields(TransferStats)})


def ledger_to_pb(value: Ledger) -> pb.Ledger:
    return pb.Ledger(
        **{name: getattr(value, name) for name in (*_PLAIN, *_OPTIONAL)},
        transfer=transfer_stats_to_pb(value.transfer),
        spans=[_span_to_pb(span) for span in value.spans],
        clocks=[pb.ClockOffset(**{n: getattr(clock, n) for n in _CLOCK}) for clock in value.clocks],
    )


def ledger_from_pb(message: pb.Ledger) -> Ledger:
    """Raises InvalidRequest for a phase this version does not know."""
    optional = {
        name: getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]
        for name in _OPTIONAL
    }
    return Ledger(
        **{name: getattr(message, name) for name in _PLAIN},
        **optional,  # type: ignore[arg-type]
        transfer=transfer_stats_from_pb(message.transfer),
        spans=tuple(_span_from_pb(span) for span in message.spans),
        clocks=tuple(ClockOffset(**{n: getattr(clock, n) for n in _CLOCK}) for clock in message.clocks),
    )


def _span_to_pb(value: Span) -> pb.Span:
    return pb.Span(phase=_PHASE[value.phase], **{name: getattr(value, name) for name in _SPAN})


def _span_from_pb(message: pb.Span) -> Span:
    phase = _PHASE_BACK.get(message.phase)
    if phase is None:
        raise InvalidRequest.field("span.phase", "is not a phase this version knows")
    return Span(phase=phase, **{name: getattr(message, name) for name in _SPAN})
