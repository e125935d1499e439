"""What the router knows of one request, and the moves its life is made of: give a try up, try again, end.

Pure. What does not live here: which event makes which move (`lifecycle`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from pdserve.types import FinishReason, HandoverMode, Key, Ledger, PeerRef, Usage
from router import events as ev

MAX_TRIES = 3
"""Tries of one request that may fail; the last failure reaches the client."""


class Phase(StrEnum):
    QUEUED = "queued"
    RESERVING = "reserving"
    RESERVED = "reserved"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(slots=True, kw_only=True)
class RequestState:
    """Everything known of one request. stop_ids: a delivered one of these ends the stream as STOP."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    term: int = 0
    phase: Phase = Phase.QUEUED
    key: Key | None = None
    next_epoch: int = 0
    num_tries: int = 0
    decode: PeerRef | None = None
    prefill: PeerRef | None = None
    mode: HandoverMode = HandoverMode.LOCAL
    prefill_live: bool = False
    prefill_lost: bool = False
    rebinding: bool = False
    delivered: list[int] = field(default_factory=list)
    avoid: frozenset[int] = frozenset()
    num_discarded: int = 0
    num_ignored: int = 0
    cached_tokens: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    prefill_ledger: Ledger | None = None

    def is_current(self, key: Key) -> bool:
        """Whether `key` is the one live try."""
        return key == self.key


def retry(state: RequestState, label: str, message: str, *, failed: PeerRef) -> list[ev.Effect]:
    """The current try is over: another one, or the end if the stream is complete or no try is left."""
    out = abandon(state)
    state.num_tries += 1
    state.avoid |= {failed.incarnation}
    finish = _finish_of(state)
    if finish is not None:
        return [*out, *end(state, finish=finish)]
    if state.num_tries >= MAX_TRIES:
        return [*out, *end(state, label=label, message=message, retry_after_s=1.0)]
    state.phase = Phase.QUEUED
    return [*out, ev.Requeue(avoid=state.avoid)]


def _finish_of(state: RequestState) -> FinishReason | None:
    """The finish reason if the tokens delivered are all there will ever be: only D's report is missing."""
    if state.delivered and state.delivered[-1] in state.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(state.delivered) >= state.max_tokens else None


def abandon(state: RequestState) -> list[ev.Effect]:
    """Fences the current try: both workers are told, nothing they still say counts."""
    if state.key is None or state.decode is None:
        return []
    out = drop_prefill(state, tell=True)
    out += [ev.CancelDecode(key=state.key, decode=state.decode), ev.ReleaseDecode(key=state.key)]
    state.key = state.decode = state.prefill = None
    return out


def drop_prefill(state: RequestState, *, tell: bool) -> list[ev.Effect]:
    """P's part is over for us; tell: it does not know yet and must stop."""
    if not state.prefill_live:
        return []
    assert state.key is not None
    assert state.prefill is not None
    state.prefill_live = False
    out: list[ev.Effect] = [ev.ReleasePrefill(key=state.key)]
    return [ev.CancelPrefill(key=state.key, prefill=state.prefill), *out] if tell else out


def end(
    state: RequestState,
    *,
    finish: FinishReason | None = None,
    label: str = "",
    message: str = "",
    retry_after_s: float | None = None,
) -> list[ev.Effect]:
    """The terminal status, after fencing whatever still runs."""
    out = [ev.LeaveQueue()] if state.phase is Phase.QUEUED else abandon(state)
    state.phase = Phase.DONE
    usage = Usage(
        prompt_tokens=len(state.prompt),
        cached_tokens=min(state.cached_tokens, len(state.prompt)),
        completion_tokens=len(state.delivered),
    )
    end = ev.EndStream(
        finish=finish,
        label=label,
        message=message,
        retry_after_s=retry_after_s,
        usage=usage,
        ledger=_merged(state.ledger, state.prefill_ledger),
        epochs=min(state.num_tries + 1, MAX_TRIES),
        discarded=state.num_discarded,
    )
    return [*out, end]


def _merged(ledger: Ledger, prefill: Ledger | None) -> Ledger:
    """D's ledger; P's part is filled in where D has not heard of it."""
    idle = prefill is None or not (prefill.prefill_computed_tokens or prefill.prefill_cached_tokens)
    if prefill is None or idle or ledger.prefill_worker:
        return ledger
    return replace(
        ledger,
        prefill_worker=prefill.prefill_worker,
        prefill_computed_tokens=prefill.prefill_computed_tokens,
        prefill_cached_tokens=prefill.prefill_cached_tokens,
        prefill_queue_s=prefill.prefill_queue_s,
        prefill_compute_s=prefill.prefill_compute_s,
    )
