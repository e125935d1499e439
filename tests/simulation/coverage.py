"""Which arrows of the state tables fired (protocol.md §9), seen by wrapping the sessions' step from the
test side.

`observed` wraps for the time of a run; `ARROWS` names every arrow that 1,000 seeds must take. Where a row
of the table names several source states or several causes, each is an arrow of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvtransfer.session import decode_events as de
from kvtransfer.session import prefill_events as pe
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.prefill import PrefillSession
from kvtransfer.transport import ReadStatus
from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from tests.simulation.bias import KINDS, RATES

_LIVE_P = ("HALF", "QUEUED", "COMPUTE", "SENT")
PREFILL_ARROWS = (
    *("P1 NONE→HALF Prefill", "P1 NONE→HALF Grant", "P1 refused"),
    *("P2 HALF→QUEUED Prefill", "P2 HALF→QUEUED Grant", "P3 QUEUED→COMPUTE"),
    *("P4 sealed, wanted", "P4 sealed, not wanted", "P4 announced", "P5 COMPUTE→QUEUED", "P6 COMPUTE→SENT"),
    *(f"P7 {state} {what}" for state in ("COMPUTE", "SENT") for what in ("Ack", "Renew", "Grant")),
    "P7 Grant grown",
    *(f"P8 {state} {what}" for state in ("COMPUTE", "SENT") for what in ("Nack", "good", "bad")),
    "P9 SENT→CLOSING",
    *(f"P10 {state}→CLOSING" for state in _LIVE_P),
    *(f"P10 by {cause}" for cause in ("cancel", "abort", "deadline", "lease", "error", "higher key")),
    *("P11 stopped", "P11 complete"),
)
DECODE_ARROWS = (
    *("D1 NONE→PULL", "D1 NONE→LOCAL", "D1 refused"),
    *("D2 new", "D2 verified", "D2 reading", "D3 good", "D3 stale", "D3 bad", "D4 stored"),
    *("D5 last page", "D5 Finish", "D5 already ended"),
    *(f"D6 by {cause}" for cause in ("lease", "abort", "bad thrice", "switch", "wrong key", "key lost")),
    *("D6 PULL→LOCAL at once", "D6 PULL→LOCAL after reads"),
    *("D7 LOCAL→RUNNING", "D7 late message", "D8 step", "D8 Finish again", "D9 RUNNING→CLOSING"),
    *("D10 RUNNING→RETRACTED", "D10 RETRACTED→RUNNING"),
    *(f"D13 {state}→CLOSING" for state in ("PULL", "LOCAL", "RUNNING")),
    *(f"D13 by {cause}" for cause in ("cancel", "deadline", "higher key", "error")),
    *("D14 quiet at once", "D14 quiet after compute", "D14 quiet after reads", "D14 quarantined"),
)
ARROWS = (*PREFILL_ARROWS, *DECODE_ARROWS)
FAULTS = (*RATES, *KINDS, "full_pool", "cancel", "deadline", "clock_rate")
LEAST = 20


@contextmanager
def observed(arrows: Counter[str], judge: Any) -> Iterator[None]:
    """While it lasts, every step of every session is looked at."""
    originals = (PrefillSession.step, DecodeSession.step)
    PrefillSession.step = _wrapped(originals[0], _PrefillWatch(arrows, judge))  # type: ignore[method-assign]
    DecodeSession.step = _wrapped(originals[1], _DecodeWatch(arrows, judge))  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrefillSession.step, DecodeSession.step = originals  # type: ignore[method-assign]


def _wrapped(original: Callable[..., Any], watch: Any) -> Callable[..., Any]:
    def step(self: Any, event: Any, now: float) -> Any:
        before = watch.before(self, event)
        effects = original(self, event, now)
        watch.after(self, event, before, effects, now)
        return effects

    return step


class _PrefillWatch:
    def __init__(self, arrows: Counter[str], judge: Any) -> None:
        self._arrows, self._judge = arrows, judge

    def before(self, session: PrefillSession, event: Any) -> Any:
        page = session.pages.get(event.index) if isinstance(event, pe.Digested) else None
        known = (session.credit, session.has_request, session.grant is not None)
        return session.state.name, page is not None and page.rehashing, known

    def after(self, session: PrefillSession, event: Any, before: Any, effects: list[Any], now: float) -> None:
        state, rehashing, known = before
        to, arrows = session.state.name, self._arrows
        kinds = {type(effect) for effect in effects}
        if to in ("CLOSING", "DONE") and state in _LIVE_P:
            self._closed(session, event, state, now)
        if to == "DONE" and state != "DONE":
            arrows["P11 complete" if session.outcome is Outcome.COMPLETE else "P11 stopped"] += 1
        if state == "COMPUTE" and to == "SENT":
            arrows["P6 COMPUTE→SENT"] += 1
        match event:
            case pe.PrefillHalf() | Grant():
                self._half(session, event, state, to, known)
            case pe.Scheduled() if state == "QUEUED" and to == "COMPUTE":
                arrows["P3 QUEUED→COMPUTE"] += 1
            case pe.Sealed() if state == "COMPUTE":
                arrows["P4 sealed, wanted" if pe.PHold in kinds else "P4 sealed, not wanted"] += 1
            case pe.Digested() if rehashing and pe.PUnpublish in kinds:
                arrows[f"P8 {state} bad"] += 1
            case pe.Digested() if pe.PSend in kinds:
                arrows[f"P8 {state} good" if rehashing else "P4 announced"] += 1
            case pe.PreemptedEvent() if to == "QUEUED" and state == "COMPUTE":
                arrows["P5 COMPUTE→QUEUED"] += 1
            case Ack() if pe.PDrop in kinds:
                arrows[f"P7 {state} Ack"] += 1
            case pe.Renewed() if state in ("COMPUTE", "SENT"):
                arrows[f"P7 {state} Renew"] += 1
            case Nack() if pe.PRehash in kinds:
                arrows[f"P8 {state} Nack"] += 1

    def _half(self, session: PrefillSession, event: Any, state: str, to: str, known: Any) -> None:
        credit, has_request, has_grant = known
        what = "Grant" if isinstance(event, Grant) else "Prefill"
        if state == "HALF" and to == "QUEUED":
            self._arrows[f"P2 HALF→QUEUED {what}"] += 1
        elif state == "HALF" and not has_request and not has_grant:
            self._arrows[f"P1 NONE→HALF {what}"] += 1
        elif what == "Grant" and state in ("COMPUTE", "SENT"):
            self._arrows[f"P7 {state} Grant"] += 1
            self._arrows["P7 Grant grown"] += session.credit > credit

    def _closed(self, session: PrefillSession, event: Any, state: str, now: float) -> None:
        if isinstance(event, Commit):
            self._arrows["P9 SENT→CLOSING"] += 1
            return
        self._arrows[f"P10 {state}→CLOSING"] += 1
        cause = self._cause(session, event, now)
        if cause:
            self._arrows[f"P10 by {cause}"] += 1
        if cause == "lease":
            self._judge.lease_over(session.key, at_prefill=True)

    def _cause(self, session: PrefillSession, event: Any, now: float) -> str:
        match event:
            case Abort():
                return "abort"
            case pe.Tick():
                return "deadline" if now >= session.deadline_at else "lease"
            case pe.Stop(outcome=Outcome.SUPERSEDED):
                return "higher key"
            case pe.Stop(outcome=Outcome.STOPPED, detail=detail):
                return "cancel" if detail == "cancelled" else "error"
        return ""


class _DecodeWatch:
    def __init__(self, arrows: Counter[str], judge: Any) -> None:
        self._arrows, self._judge = arrows, judge

    def before(self, session: DecodeSession, event: Any) -> Any:
        page = session.pages.get(event.index) if isinstance(event, Announce) else None
        known = (
            "new" if page is None else "verified" if page.verified else "reading" if page.reading else "new"
        )
        return session.state.name, session.switching, known

    def after(self, session: DecodeSession, event: Any, before: Any, effects: list[Any], now: float) -> None:
        state, switching, known = before
        to, arrows = session.state.name, self._arrows
        kinds = {type(effect) for effect in effects}
        if state == "PULL" and to == "LOCAL" and not isinstance(event, de.Accepted):
            arrows["D6 PULL→LOCAL after reads" if switching else "D6 PULL→LOCAL at once"] += 1
        if state == "PULL" and not switching and (session.switching or to == "LOCAL"):
            self._switched(session, event, now)
        if de.DRun in kinds:
            self._ran(session, event, to)
        if to == "DONE" and state != "DONE":
            self._quiet(event)
        match event:
            case de.Accepted():
                arrows[f"D1 NONE→{to}"] += 1
            case Announce() if state == "PULL" and not switching:
                arrows[f"D2 {known}"] += 1
            case Announce() | Finish() if state in ("LOCAL", "RUNNING"):
                late = isinstance(event, Finish) and session.committed
                arrows["D8 Finish again" if late else "D7 late message"] += 1
            case de.ReadEnded() if state == "PULL" and not switching:
                self._read(event, kinds)
            case Finish() if state == "PULL" and to == "PULL":
                arrows["D4 stored"] += 1
            case de.Sampled():
                arrows["D7 LOCAL→RUNNING" if state == "LOCAL" else "D8 step"] += state in ("LOCAL", "RUNNING")
            case de.Finished() if state == "RUNNING":
                arrows["D9 RUNNING→CLOSING"] += 1
            case de.Stop() | de.Tick() if to in ("CLOSING", "DONE") and state not in ("CLOSING", "DONE"):
                arrows[f"D13 {state}→CLOSING"] += 1
                arrows[f"D13 by {self._cause(event)}"] += 1

    def _ran(self, session: DecodeSession, event: Any, to: str) -> None:
        by = "D5 Finish" if isinstance(event, Finish) else "D5 last page"
        self._arrows["D5 already ended" if to != "RUNNING" else by] += 1
        self._judge.committed(session.key)

    def _read(self, event: de.ReadEnded, kinds: set[type]) -> None:
        status = event.status
        if status is ReadStatus.GOOD:
            self._arrows["D3 good"] += 1
        elif status is ReadStatus.STALE:
            self._arrows["D3 stale"] += 1
        elif status is ReadStatus.MISMATCH and de.DSend in kinds:
            self._arrows["D3 bad"] += 1

    def _switched(self, session: DecodeSession, event: Any, now: float) -> None:
        cause = ""
        match event:
            case de.Tick():
                cause = "lease"
                self._judge.lease_over(session.key, at_prefill=False)
            case Abort():
                cause = "abort"
            case de.ReadEnded(status=ReadStatus.MISMATCH):
                cause = "bad thrice"
            case de.WrongPage():
                cause = "wrong key"
            case de.Switch(detail=detail):
                cause = "key lost" if "lost this key" in detail else "switch"
        if cause:
            self._arrows[f"D6 by {cause}"] += 1

    def _cause(self, event: Any) -> str:
        if isinstance(event, de.Tick):
            return "deadline"
        if event.outcome is Outcome.SUPERSEDED:
            return "higher key"
        return "cancel" if event.label == "cancelled" else "error"

    def _quiet(self, event: Any) -> None:
        match event:
            case de.ReadEnded():
                self._arrows["D14 quiet after reads"] += 1
            case de.ComputeQuiet():
                self._arrows["D14 quiet after compute"] += 1
            case _:
                self._arrows["D14 quiet at once"] += 1


def table(arrows: Counter[str], faults: Counter[str]) -> str:
    """The coverage table, readable."""
    lines = [f"{'arrow':36} times"]
    lines += [f"{name:36} {arrows[name]:>9,}" for name in ARROWS]
    lines += ["", f"{'fault':36} times", *(f"{name:36} {faults[name]:>9,}" for name in FAULTS)]
    return "\n".join(lines)


def missing(arrows: Counter[str], faults: Counter[str], least: int = LEAST) -> list[str]:
    """What fired fewer than `least` times."""
    return [n for n in ARROWS if arrows[n] < least] + [n for n in FAULTS if faults[n] < least]
