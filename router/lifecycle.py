"""One request's life on the router, as a pure state machine: tries, fencing by key, the one terminal status.

What lives here: which worker's words count, when to cancel, switch, try again or end. What does not: choosing
workers (`policy`), waiting (`admission`), calls and timers (`request`).
`step` changes the state (`request_state`) in place and returns what to do; nothing else may change it.

    QUEUED -Assigned-> RESERVING -Reserved-> RESERVED -Token-> RUNNING -Ended-> DONE
       ^------------ refused, broken, lost: a new epoch -----------|   | StopMatched
                                                               STOPPING -Ended, StopSettled-> DONE

Epochs in which a worker refused because it is full or draining do not count against MAX_TRIES (nothing was
started); the queue and the deadline bound those. When only P refused, the next epoch stays with D, which
keeps its reservation, and takes another P, each at most once; without another P, D computes the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.messages import Ended, Outcome, Prefilled, Refusal, Refused, Reserved, Token
from pdserve.types import FinishReason, HandoverMode, Key, PeerRef
from router import events as ev
from router.request_state import Phase, RequestState, abandon, drop_prefill, end, retry

MIN_BLOCK_S, MAX_BLOCK_S = 0.1, 5.0
_ANOTHER_MAY = frozenset(
    {
        Refusal.FULL,
        Refusal.DRAINING,
        Refusal.STALE_INCARNATION,
        Refusal.NEVER_FITS,
        Refusal.INCOMPATIBLE,
    }
)
"""Refusals of a prefill worker that say nothing about other ones."""
_WITH_DECODE = (Phase.RESERVING, Phase.RESERVED, Phase.RUNNING)


def step(state: RequestState, event: ev.Event) -> list[ev.Effect]:
    """Takes one event. After the terminal status nothing has an effect any more."""
    if state.phase is Phase.DONE:
        return []
    handler: Callable[[RequestState, Any], list[ev.Effect]] = _HANDLERS[type(event)]
    return handler(state, event)


def _assigned(state: RequestState, event: ev.Assigned) -> list[ev.Effect]:
    return _try(state, event.decode, event.prefill) if state.phase is Phase.QUEUED else []


def _try(state: RequestState, decode: PeerRef, prefill: PeerRef | None) -> list[ev.Effect]:
    """Mints the next epoch and sends both halves."""
    key = Key(request_id=state.request_id, term=state.term, epoch=state.next_epoch)
    state.key, state.next_epoch, state.phase = key, state.next_epoch + 1, Phase.RESERVING
    state.decode, state.prefill = decode, prefill
    state.mode = HandoverMode.LOCAL if prefill is None else HandoverMode.DISAGGREGATED
    state.prefill_live, state.prefill_lost, state.prefill_ledger = prefill is not None, False, None
    state.rebinding = False
    tokens, forced = state.prompt + tuple(state.delivered), len(state.delivered)
    reserve = ev.SendReserve(
        key=key, decode=decode, prefill=prefill, mode=state.mode, token_ids=tokens, num_forced=forced
    )
    if prefill is None:
        return [reserve]
    half = ev.SendPrefill(key=key, decode=decode, prefill=prefill, token_ids=tokens, num_forced=forced)
    return [reserve, half]


# ---- D's words ---------------------------------------------------------------------------------------


def _reserved(state: RequestState, event: Reserved) -> list[ev.Effect]:
    if not state.is_current(event.key) or state.phase is not Phase.RESERVING:
        return []
    state.phase = Phase.RESERVED
    if event.mode is HandoverMode.LOCAL:
        state.mode = HandoverMode.LOCAL
        return drop_prefill(state, tell=True)
    return _switch(state) if state.prefill_lost and not state.rebinding else []


def _refused(state: RequestState, event: Refused) -> list[ev.Effect]:
    if not state.is_current(event.key) or state.phase is not Phase.RESERVING:
        return []
    assert state.decode is not None
    decode = state.decode
    if event.reason is Refusal.NEVER_FITS:
        message = "The prompt and its completion do not fit a worker's KV cache: ask for fewer tokens."
        if event.retry_after_s:  # it would fit that worker's whole pool: pages are out of use there
            return retry(state, "never_fits", message, failed=decode)
        return end(state, label="never_fits", message=message)
    if event.reason not in (Refusal.FULL, Refusal.DRAINING):
        message = "The workers did not take the request; try again."
        return retry(state, "unavailable", message, failed=decode)
    out = abandon(state)
    state.phase = Phase.QUEUED
    block_s = min(max(event.retry_after_s, MIN_BLOCK_S), MAX_BLOCK_S)
    return [*out, ev.Requeue(avoid=state.avoid, blocked=decode.incarnation, block_s=block_s)]


def _token(state: RequestState, event: Token) -> list[ev.Effect]:
    if not state.is_current(event.key):
        state.num_ignored += 1
        return []
    if state.phase is Phase.STOPPING:
        state.num_discarded += 1
        return []
    if event.index != len(state.delivered):
        return _out_of_order(state, event)
    state.phase = Phase.RUNNING
    state.delivered.append(event.token_id)
    out: list[ev.Effect] = [ev.Emit(index=event.index, token_id=event.token_id, logprob=event.logprob)]
    return [*drop_prefill(state, tell=False), *out] if state.prefill_live else out


def _out_of_order(state: RequestState, event: Token) -> list[ev.Effect]:
    """A repeated token is dropped; after a gap nothing more from this try can be used."""
    if event.index < len(state.delivered):
        state.num_ignored += 1
        return []
    assert state.decode is not None
    return retry(state, "internal", "A worker lost a part of the answer.", failed=state.decode)


def _ended(state: RequestState, event: Ended) -> list[ev.Effect]:
    if not state.is_current(event.key):
        return []
    assert state.decode is not None
    state.ledger = event.ledger
    state.cached_tokens = event.usage.cached_tokens
    if state.phase is Phase.STOPPING:
        return _finished(state, FinishReason.STOP)
    if event.finish is not None:
        return _finished(state, event.finish)
    if event.retryable:
        return retry(state, event.error_label, event.error_message, failed=state.decode)
    return _finished(state, None, event.error_label, event.error_message)


def _finished(
    state: RequestState, finish: FinishReason | None, label: str = "", message: str = ""
) -> list[ev.Effect]:
    """D has ended this key itself, so there is nothing to cancel there."""
    assert state.key is not None
    out = drop_prefill(state, tell=state.mode is HandoverMode.LOCAL or finish is None)
    out.append(ev.ReleaseDecode(key=state.key))
    state.key = state.decode = state.prefill = None
    return [*out, *end(state, finish=finish, label=label, message=message)]


def _decode_broken(state: RequestState, event: ev.DecodeBroken) -> list[ev.Effect]:
    if not state.is_current(event.key):
        return []
    assert state.decode is not None
    if state.phase is Phase.STOPPING:
        return _finished(state, FinishReason.STOP)
    if not event.retryable:
        return _finished(state, None, event.label, event.message)
    return retry(state, event.label, event.message, failed=state.decode)


def _switch_answered(state: RequestState, event: ev.SwitchAnswered) -> list[ev.Effect]:
    """COMPLETE and STOPPING are good, D's stream tells the rest; without a record D has lost the request."""
    lost = event.outcome in (None, Outcome.UNKNOWN, Outcome.NEVER_STARTED)
    if not lost or not state.is_current(event.key) or state.phase is not Phase.RESERVED:
        return []
    assert state.decode is not None
    return retry(state, "worker_lost", "A worker was lost; try again.", failed=state.decode)


# ---- P's words ---------------------------------------------------------------------------------------


def _prefilled(state: RequestState, event: Prefilled) -> list[ev.Effect]:
    if not state.is_current(event.key):
        return []
    state.prefill_ledger = event.ledger
    if event.outcome is Outcome.COMPLETE:
        return drop_prefill(state, tell=False)
    return _prefill_failed(state)


def _prefill_refused(state: RequestState, event: ev.PrefillRefused) -> list[ev.Effect]:
    if not state.is_current(event.refused.key):
        return []
    if event.refused.reason not in _ANOTHER_MAY or state.phase not in (Phase.RESERVING, Phase.RESERVED):
        return _prefill_failed(state)
    if not state.prefill_live:
        return []
    assert state.key is not None
    assert state.decode is not None
    assert state.prefill is not None
    state.rebinding = state.prefill_lost = True
    state.avoid |= {state.prefill.incarnation}
    rebind = ev.Rebind(key=state.key, decode=state.decode, avoid=state.avoid)
    return [*drop_prefill(state, tell=False), rebind]


def _rebound(state: RequestState, event: ev.Rebound) -> list[ev.Effect]:
    """D learns of the next epoch by its Reserve; that ends the lower key there, so nothing is cancelled."""
    if not state.is_current(event.key) or not state.rebinding:
        return []
    state.rebinding = False
    waits = state.phase in (Phase.RESERVING, Phase.RESERVED) and state.mode is HandoverMode.DISAGGREGATED
    if not waits:
        return []  # meanwhile D has chosen to compute the prompt itself
    assert state.key is not None
    assert state.decode is not None
    if event.prefill is not None:
        return [ev.ReleaseDecode(key=state.key), *_try(state, state.decode, event.prefill)]
    return _switch(state) if state.phase is Phase.RESERVED else []


def _prefill_broken(state: RequestState, event: ev.PrefillBroken) -> list[ev.Effect]:
    return _prefill_failed(state) if state.is_current(event.key) else []


def _prefill_failed(state: RequestState) -> list[ev.Effect]:
    """P's part ended without a handover: D computes the rest itself, keeping its reservation."""
    if not state.prefill_live:
        return []
    assert state.prefill is not None
    state.avoid |= {state.prefill.incarnation}
    out = drop_prefill(state, tell=False)
    if state.phase is Phase.RESERVING:
        state.prefill_lost = True
        return out
    return [*out, *_switch(state)] if state.phase is Phase.RESERVED else out


def _switch(state: RequestState) -> list[ev.Effect]:
    assert state.key is not None
    assert state.decode is not None
    state.mode = HandoverMode.LOCAL
    return [ev.SwitchLocal(key=state.key, decode=state.decode)]


# ---- everything else ---------------------------------------------------------------------------------


def _worker_gone(state: RequestState, event: ev.WorkerGone) -> list[ev.Effect]:
    if state.decode is not None and state.decode.incarnation == event.incarnation:
        if state.phase is Phase.STOPPING:
            return _finished(state, FinishReason.STOP)
        return retry(state, "worker_lost", "A worker was lost; try again.", failed=state.decode)
    if state.prefill is not None and state.prefill.incarnation == event.incarnation:
        return _prefill_failed(state)
    return []


def _stop_matched(state: RequestState, event: ev.StopMatched) -> list[ev.Effect]:
    if state.phase not in _WITH_DECODE:
        return end(state, finish=FinishReason.STOP) if state.phase is Phase.QUEUED else []
    assert state.key is not None
    assert state.decode is not None
    state.phase = Phase.STOPPING
    return [ev.CancelDecode(key=state.key, decode=state.decode, keep_stream=True)]


def _stop_settled(state: RequestState, event: ev.StopSettled) -> list[ev.Effect]:
    return end(state, finish=FinishReason.STOP) if state.phase is Phase.STOPPING else []


def _shed(state: RequestState, event: ev.Shed) -> list[ev.Effect]:
    if state.phase is not Phase.QUEUED:
        return []
    return end(state, label="overloaded", message=event.message, retry_after_s=event.retry_after_s)


def _client_gone(state: RequestState, event: ev.ClientGone) -> list[ev.Effect]:
    return end(state, label="cancelled", message="The client went away.")


def _abort_asked(state: RequestState, event: ev.AbortAsked) -> list[ev.Effect]:
    if state.phase is Phase.STOPPING:
        return end(state, finish=FinishReason.STOP)
    hint = 1.0 if event.label == "draining" else None
    return end(state, label=event.label, message=event.message, retry_after_s=hint)


def _deadline_hit(state: RequestState, event: ev.DeadlineHit) -> list[ev.Effect]:
    if state.phase is Phase.STOPPING:
        return end(state, finish=FinishReason.STOP)
    return end(state, label="deadline_expired", message="The request's deadline passed before it ended.")


_HANDLERS: dict[type, Callable[[RequestState, Any], list[ev.Effect]]] = {
    ev.Assigned: _assigned,
    ev.Rebound: _rebound,
    Reserved: _reserved,
    Refused: _refused,
    Token: _token,
    Ended: _ended,
    Prefilled: _prefilled,
    ev.PrefillRefused: _prefill_refused,
    ev.DecodeBroken: _decode_broken,
    ev.PrefillBroken: _prefill_broken,
    ev.SwitchAnswered: _switch_answered,
    ev.WorkerGone: _worker_gone,
    ev.StopMatched: _stop_matched,
    ev.StopSettled: _stop_settled,
    ev.Shed: _shed,
    ev.ClientGone: _client_gone,
    ev.AbortAsked: _abort_asked,
    ev.DeadlineHit: _deadline_hit,
}
