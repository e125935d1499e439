"""One request's ledger on the router's clock: everybody's spans together, the path to the first token. Pure.

What lives here: conversion by clock offsets, the router's own spans, the figures made from them. What does
not: the stamps themselves (whoever does the work takes them) and offsets (`router.clocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdserve.types import ClockOffset, Ledger, Phase, Span

_AFTER_COMPUTE = frozenset({Phase.ANNOUNCE, Phase.WIRE, Phase.VERIFY})


@dataclass(slots=True, kw_only=True)
class Journal:
    """The router's stamps of one request, by its own clock. waits: each try's (since when it could be sent,
    when its calls were about to be sent). first: the first token's ledger as its worker sent it."""

    came_at: float
    queued_at: float
    waits: list[tuple[float, float]] = field(default_factory=list)
    waiting_since: float
    first: Ledger | None = None
    first_at: float | None = None
    path_tries: int = 0
    clocks: dict[str, ClockOffset] = field(default_factory=dict)

    def sent(self, now: float) -> None:
        """A try's calls are about to be sent. A next one that is not queued (another prefill worker is taken)
        waits from here on.
        """
        self.waits.append((self.waiting_since, now))
        self.waiting_since = now

    def requeued(self, now: float) -> None:
        """The request waits for another try."""
        self.waiting_since = now

    def token(self, ledger: Ledger | None, now: float, clocks: Sequence[ClockOffset]) -> None:
        """The first token came; later ones change nothing. clocks: of the workers, as estimated now."""
        if self.first_at is None:
            self.first, self.first_at, self.path_tries = ledger, now, len(self.waits)
            self.clocks = {clock.worker: clock for clock in clocks}


def assemble(journal: Journal, told: Ledger, clocks: Sequence[ClockOffset], now: float) -> Ledger:
    """The whole ledger. told: what the workers said last; clocks: used if no first token has come yet."""
    offsets = journal.clocks or {clock.worker: clock for clock in clocks}
    first = journal.first
    spans = told.spans if first is None else _both(first, told)
    known = [_shifted(span, offsets, journal.came_at) for span in spans if _clocks_of(span) <= offsets.keys()]
    ended = max((s.end_s for s in known if s.phase is Phase.COMPUTE and s.on_path), default=None)
    if ended is not None:
        known = [_clipped(span, ended) for span in known]
    known = _own(journal, known, offsets, now) + [s for s in known if s.phase is not Phase.DISPATCH]
    ttft = None if journal.first_at is None else journal.first_at - journal.came_at
    return replace(
        told,
        spans=tuple(sorted(known, key=lambda span: span.begin_s)),
        clocks=tuple(offsets.values()),
        ttft_s=ttft,
        residual_s=None if ttft is None else ttft - sum(s.end_s - s.begin_s for s in known if s.on_path),
        handover_s=_handover(known, ended),
        wire_hidden=_hidden(known, ended),
    )


def _both(first: Ledger, told: Ledger) -> list[Span]:
    """The path as it was when the first token came, and everything beside it as told last."""
    rest = told.spans or first.spans
    return [s for s in first.spans if s.on_path] + [s for s in rest if not s.on_path]


def _clocks_of(span: Span) -> set[str]:
    return {name for name in (span.begin_clock, span.end_clock) if name}


def _shifted(span: Span, offsets: Mapping[str, ClockOffset], zero: float) -> Span:
    """By the router's clock, from `zero` on. The sum of parts between two clocks is put right, too."""
    begin = offsets[span.begin_clock].offset_s - zero if span.begin_clock else -zero
    end = offsets[span.end_clock].offset_s - zero if span.end_clock else -zero
    return replace(
        span, begin_s=span.begin_s + begin, end_s=span.end_s + end,
        sum_s=span.sum_s + span.count * (end - begin) if span.sum_s else 0.0,
    )  # fmt: skip


def _clipped(span: Span, ended: float) -> Span:
    """On the path a transfer counts from the last chunk's end on; before it, compute hides it."""
    if not span.on_path or span.phase not in _AFTER_COMPUTE:
        return span
    return replace(span, begin_s=max(span.begin_s, ended), end_s=max(span.end_s, ended))


def _own(
    journal: Journal, known: Sequence[Span], offsets: Mapping[str, ClockOffset], now: float
) -> list[Span]:
    """The router's spans."""
    came = journal.came_at
    out = [_span(Phase.TOKENISE, 0.0, journal.queued_at - came)]
    tries = journal.path_tries or len(journal.waits)
    for number, (begin, end) in enumerate(journal.waits, 1):
        out.append(replace(_span(Phase.QUEUE, begin - came, end - came), on_path=number <= tries))
    arrived = _arrival(known)
    if journal.waits and arrived is not None:
        sent = journal.waits[tries - 1][1] - came
        out.append(replace(_span(Phase.DISPATCH, sent, arrived.begin_s), end_clock=arrived.begin_clock))
    elif journal.waits and journal.first_at is None and not known:
        out.append(_span(Phase.DISPATCH, journal.waits[-1][1] - came, now - came))
    emitted = [s for s in known if s.phase is Phase.ADMIT]
    if journal.first_at is not None and emitted:
        back = _span(Phase.RETURN, emitted[-1].end_s, journal.first_at - came)
        out.append(replace(back, begin_clock=emitted[-1].end_clock))
    return out


def _arrival(known: Sequence[Span]) -> Span | None:
    """The stretch whose begin ends the dispatch: the first wait on the path, else decode's reservation."""
    waits = [s for s in known if s.phase is Phase.PREFILL_QUEUE and s.on_path]
    marks = [s for s in known if s.phase is Phase.DISPATCH]
    return min(waits or marks, key=lambda span: span.begin_s, default=None)


def _span(phase: Phase, begin: float, end: float) -> Span:
    return Span(phase=phase, begin_s=begin, end_s=end, on_path=True)


def _handover(known: Sequence[Span], ended: float | None) -> float | None:
    steps = [s.begin_s for s in known if s.phase is Phase.FIRST_STEP]
    return steps[0] - ended if steps and ended is not None else None


def _hidden(known: Sequence[Span], ended: float | None) -> float | None:
    runs = [s for s in known if s.phase is Phase.WIRE and not s.on_path]
    total = sum(s.end_s - s.begin_s for s in runs)
    if ended is None or total <= 0:
        return None
    return sum(max(0.0, min(s.end_s, ended) - s.begin_s) for s in runs) / total
