"""The request's state machine: named cases, and for any order of events one end and every token once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import BY_LABEL
from pdserve.messages import Ended, Outcome, Prefilled, Refusal, Refused, Reserved, Token
from pdserve.types import FinishReason, HandoverMode, Key, Ledger, PeerRef, Usage
from router import events as ev
from router.lifecycle import step
from router.request_state import MAX_TRIES, Phase, RequestState

PROMPT = (1, 2, 3)
P = [PeerRef(worker_id=f"p{n}", incarnation=100 + n, control="127.0.0.1:1") for n in range(2)]
D = [PeerRef(worker_id=f"d{n}", incarnation=200 + n, control="127.0.0.1:2") for n in range(2)]
STOP_ID = 99


def key(epoch: int) -> Key:
    return Key(request_id="r", epoch=epoch)


def fresh(max_tokens: int = 8) -> RequestState:
    return RequestState(request_id="r", prompt=PROMPT, max_tokens=max_tokens, stop_ids=frozenset({STOP_ID}))


def run(state: RequestState, *events: ev.Event) -> list[ev.Effect]:
    """All effects of these events."""
    return [effect for event in events for effect in step(state, event)]


def kinds(effects: list[ev.Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def end_of(effects: list[ev.Effect]) -> ev.EndStream:
    (end,) = [effect for effect in effects if isinstance(effect, ev.EndStream)]
    return end


def reserved(epoch: int = 0, mode: HandoverMode = HandoverMode.DISAGGREGATED) -> Reserved:
    return Reserved(key=key(epoch), mode=mode, hit_tokens=0)


def token(index: int, epoch: int = 0, token_id: int = 5) -> Token:
    return Token(key=key(epoch), index=index, token_id=token_id)


def broken(epoch: int = 0) -> ev.DecodeBroken:
    return ev.DecodeBroken(key=key(epoch), label="worker_lost", message="x")


def running(num_tokens: int, *, prefill: PeerRef | None = P[0], max_tokens: int = 8) -> RequestState:
    state = fresh(max_tokens)
    mode = HandoverMode.LOCAL if prefill is None else HandoverMode.DISAGGREGATED
    run(state, ev.Assigned(decode=D[0], prefill=prefill), reserved(mode=mode))
    run(state, *(token(i) for i in range(num_tokens)))
    return state


def test_both_halves_go_out_together() -> None:
    reserve, prefill = run(fresh(), ev.Assigned(decode=D[0], prefill=P[0]))
    assert isinstance(reserve, ev.SendReserve)
    assert isinstance(prefill, ev.SendPrefill)
    assert reserve.key == prefill.key == key(0)
    assert (reserve.token_ids, reserve.num_forced) == (PROMPT, 0)


def test_a_new_epoch_carries_the_delivered_tokens_as_forced_ones() -> None:
    state = running(3)
    effects = run(state, broken())
    assert kinds(effects) == [ev.CancelDecode, ev.ReleaseDecode, ev.Requeue]
    reserve, _ = run(state, ev.Assigned(decode=D[1], prefill=P[0]))
    assert isinstance(reserve, ev.SendReserve)
    assert (reserve.key, reserve.token_ids, reserve.num_forced) == (key(1), (*PROMPT, 5, 5, 5), 3)
    assert run(state, token(3, epoch=0)) == []
    assert run(state, reserved(1), token(3, epoch=1))[-1] == ev.Emit(index=3, token_id=5)


def test_the_first_token_frees_the_prefill_worker() -> None:
    state = running(0)
    assert kinds(run(state, token(0))) == [ev.ReleasePrefill, ev.Emit]
    assert run(state, Prefilled(key=key(0), outcome=Outcome.COMPLETE)) == []


def test_decode_that_prefills_itself_cancels_prefill() -> None:
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]))
    assert kinds(run(state, reserved(mode=HandoverMode.LOCAL))) == [ev.CancelPrefill, ev.ReleasePrefill]


def test_prefill_lost_before_reserved_switches_as_soon_as_decode_has_it() -> None:
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]))
    assert kinds(run(state, ev.PrefillBroken(key=key(0)))) == [ev.ReleasePrefill]
    assert run(state, reserved()) == [ev.SwitchLocal(key=key(0), decode=D[0])]


def test_prefill_lost_after_the_first_token_changes_nothing() -> None:
    state = running(1)
    assert run(state, ev.PrefillBroken(key=key(0)), ev.WorkerGone(incarnation=P[0].incarnation)) == []


def test_loss_of_either_worker_by_membership() -> None:
    assert kinds(run(running(0), ev.WorkerGone(incarnation=P[0].incarnation))) == [
        ev.ReleasePrefill,
        ev.SwitchLocal,
    ]
    effects = run(running(1), ev.WorkerGone(incarnation=D[0].incarnation))
    assert isinstance(effects[-1], ev.Requeue)
    assert effects[-1].avoid == frozenset({D[0].incarnation})
    assert run(running(1), ev.WorkerGone(incarnation=7)) == []


def test_full_blocks_the_worker_and_is_no_failed_try() -> None:
    state = fresh()
    for epoch in range(9):
        run(state, ev.Assigned(decode=D[0], prefill=P[0]))
        effects = run(state, Refused(key=key(epoch), reason=Refusal.FULL, retry_after_s=0.5))
        assert effects[-1] == ev.Requeue(avoid=frozenset(), blocked=D[0].incarnation, block_s=0.5)
    assert state.num_tries == 0


def test_what_never_fits_ends_at_once_unless_only_pages_are_out_of_use_there() -> None:
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]))
    assert end_of(run(state, Refused(key=key(0), reason=Refusal.NEVER_FITS))).label == "never_fits"
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]))
    effects = run(state, Refused(key=key(0), reason=Refusal.NEVER_FITS, retry_after_s=0.1))
    assert effects[-1] == ev.Requeue(avoid=frozenset({D[0].incarnation}))


def test_three_failures_end_it_with_the_last_error() -> None:
    state = fresh()
    effects: list[ev.Effect] = []
    for epoch in range(MAX_TRIES):
        run(state, ev.Assigned(decode=D[0], prefill=None))
        effects = run(state, broken(epoch))
    assert end_of(effects).label == "worker_lost"
    assert end_of(effects).retry_after_s


def test_a_complete_stream_does_not_need_its_report() -> None:
    full = run(running(8), broken())
    assert end_of(full).finish is FinishReason.LENGTH
    state = running(2)
    run(state, token(2, token_id=STOP_ID))
    assert end_of(run(state, broken())).finish is FinishReason.STOP


def test_a_stop_text_cancels_discards_and_waits_for_the_report() -> None:
    state = running(3)
    (cancel,) = run(state, ev.StopMatched())
    assert cancel == ev.CancelDecode(key=key(0), decode=D[0], keep_stream=True)
    assert run(state, token(3), token(4)) == []
    ended = Ended(
        key=key(0), finish=None, error_label="cancelled", ledger=Ledger(decode_worker="d0"),
        usage=Usage(cached_tokens=2),
    )  # fmt: skip
    end = end_of(run(state, ended))
    assert (end.finish, end.discarded, end.ledger.decode_worker) == (FinishReason.STOP, 2, "d0")
    assert end.usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3)


def test_after_a_stop_text_nothing_can_make_it_an_error() -> None:
    events: list[ev.Event] = [
        broken(), ev.StopSettled(), ev.DeadlineHit(), ev.AbortAsked(),
        ev.WorkerGone(incarnation=D[0].incarnation),
    ]  # fmt: skip
    for event in events:
        state = running(3)
        run(state, ev.StopMatched())
        assert end_of(run(state, event)).finish is FinishReason.STOP


def test_an_end_by_the_client_cancels_both_sides() -> None:
    for event in (ev.ClientGone(), ev.AbortAsked(), ev.DeadlineHit()):
        effects = run(running(0), event)
        assert kinds(effects) == [
            ev.CancelPrefill, ev.ReleasePrefill, ev.CancelDecode, ev.ReleaseDecode, ev.EndStream,
        ]  # fmt: skip
        assert kinds(run(fresh(), event)) == [ev.LeaveQueue, ev.EndStream]


def test_an_answered_switch_without_a_record_is_a_lost_try() -> None:
    for outcome, lost in ((None, True), (Outcome.UNKNOWN, True), (Outcome.STOPPING, False)):
        state = running(0)
        run(state, ev.PrefillBroken(key=key(0)))
        effects = run(state, ev.SwitchAnswered(key=key(0), outcome=outcome))
        assert any(isinstance(effect, ev.Requeue) for effect in effects) is lost


def test_prefill_figures_fill_a_ledger_that_lacks_them() -> None:
    state = running(0)
    ledger = Ledger(prefill_worker="p0", prefill_computed_tokens=3, prefill_compute_s=0.5)
    run(state, Prefilled(key=key(0), outcome=Outcome.COMPLETE, ledger=ledger), token(0))
    end = end_of(run(state, Ended(key=key(0), finish=FinishReason.LENGTH, ledger=Ledger(decode_worker="d0"))))
    assert (end.ledger.prefill_worker, end.ledger.prefill_computed_tokens) == ("p0", 3)
    assert end.ledger.decode_worker == "d0"


# ---- any order of events -----------------------------------------------------------------------------

keys = st.integers(0, 4).map(key)
peers_p, peers_d = st.sampled_from(P), st.sampled_from(D)
finishes = st.sampled_from(FinishReason)
events = st.one_of(
    st.builds(ev.Assigned, decode=peers_d, prefill=st.none() | peers_p),
    st.builds(Reserved, key=keys, mode=st.sampled_from(HandoverMode), hit_tokens=st.just(0)),
    st.builds(Refused, key=keys, reason=st.sampled_from(Refusal)),
    st.builds(Token, key=keys, index=st.integers(0, 9), token_id=st.sampled_from([5, STOP_ID])),
    st.builds(Ended, key=keys, finish=finishes),
    st.builds(
        Ended, key=keys, finish=st.none(), error_label=st.sampled_from(sorted(BY_LABEL)),
        retryable=st.booleans(),
    ),
    st.builds(Prefilled, key=keys, outcome=st.sampled_from(Outcome)),
    st.builds(ev.PrefillRefused, refused=st.builds(Refused, key=keys, reason=st.sampled_from(Refusal))),
    st.builds(ev.DecodeBroken, key=keys, label=st.just("internal"), message=st.just(""),
              retryable=st.booleans()),
    st.builds(ev.PrefillBroken, key=keys),
    st.builds(ev.Rebound, key=keys, prefill=st.none() | peers_p),
    st.builds(ev.SwitchAnswered, key=keys, outcome=st.none() | st.sampled_from(Outcome)),
    st.builds(ev.WorkerGone, incarnation=st.sampled_from([p.incarnation for p in (*P, *D)])),
    st.just(ev.StopMatched()),
    st.just(ev.StopSettled()),
    st.just(ev.Shed(message="", retry_after_s=1.0)),
)  # fmt: skip
last_words: st.SearchStrategy[ev.Event] = st.sampled_from(
    [ev.ClientGone(), ev.AbortAsked(), ev.DeadlineHit()]
)
advance = st.sampled_from(
    [
        "assign",
        "assign",
        "reserved",
        "token",
        "token",
        "token",
        "repeat",
        "gap",
        "stale",
        "broken",
        "full",
        "prefilled",
        "no_prefill",
        "p_refused",
        "p_refused",
        "rebound",
        "rebound",
        "no_switch",
        "decode_gone",
        "prefill_gone",
        "stop",
        "ended",
        "failed",
    ]
)
# A flat one_of would draw fitting events one time in sixteen only, and runs would stay shallow.
mostly_fitting = st.integers(0, 3).flatmap(
    lambda dice: st.tuples(advance, st.integers(0, 5)) if dice else events
)


def likely(state: RequestState, what: str, num: int) -> ev.Event:
    """An event that fits the state, so that runs get deep."""
    current = state.key or key(0)
    size = len(state.delivered)
    stale = Key(request_id="r", epoch=current.epoch - 1 if current.epoch else 77)
    made: dict[str, Any] = {
        "repeat": Token(key=current, index=max(0, size - 1 - num), token_id=6 if size else 5),
        "gap": Token(key=current, index=size + 1 + num, token_id=6),
        "stale": Token(key=stale, index=size, token_id=6),
        "prefilled": Prefilled(key=current, outcome=Outcome.COMPLETE),
        "p_refused": ev.PrefillRefused(refused=Refused(key=current, reason=Refusal.DRAINING)),
        "rebound": ev.Rebound(key=current, prefill=P[num % 2] if num % 3 else None),
        "no_prefill": ev.PrefillBroken(key=current),
        "no_switch": ev.SwitchAnswered(key=current, outcome=None),
        "decode_gone": ev.WorkerGone(incarnation=D[num % 2].incarnation),
        "prefill_gone": ev.WorkerGone(incarnation=P[num % 2].incarnation),
        "stop": ev.StopMatched(),
        "failed": Ended(key=current, finish=None, error_label="internal", retryable=True),
        "assign": ev.Assigned(decode=D[num % 2], prefill=P[num % 2] if num % 3 else None),
        "reserved": Reserved(key=current, mode=state.mode, hit_tokens=0),
        "token": Token(key=current, index=len(state.delivered), token_id=5),
        "broken": ev.DecodeBroken(key=current, label="worker_lost", message=""),
        "full": Refused(key=current, reason=Refusal.FULL),
        "ended": Ended(key=current, finish=FinishReason.LENGTH),
    }
    event: ev.Event = made[what]
    return event


class Checked:
    """Applies effects as a driver would and checks the invariants after each."""

    def __init__(self) -> None:
        self.state = fresh()
        self.emitted: list[int] = []
        self.ends: list[ev.EndStream] = []
        self.decode_load: set[Key] = set()
        self.prefill_load: set[Key] = set()
        self.told_decode: set[Key] = set()
        self.sent: set[Key] = set()
        self.queued = True
        self.rebinding = False

    def apply(self, event: ev.Event) -> None:
        assert not (self.ends and step(self.state, event)), "an effect after the end"
        for effect in step(self.state, event) if not self.ends else []:
            self.effect(effect)
        assert self.queued == (self.state.phase is Phase.QUEUED)

    def effect(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SendReserve():
                assert self.queued or self.rebinding, "only a rebinding needs no new place in the queue"
                self.rebinding = False
                assert all(effect.key > old for old in self.sent), "epochs only rise"
                assert effect.token_ids == (*PROMPT, *self.emitted)
                assert effect.num_forced == len(self.emitted)
                self.sent.add(effect.key)
                self.decode_load.add(effect.key)
                self.queued = False
            case ev.SendPrefill():
                self.prefill_load.add(effect.key)
            case ev.ReleaseDecode():
                self.decode_load.remove(effect.key)
            case ev.ReleasePrefill():
                self.prefill_load.remove(effect.key)
            case ev.Emit():
                assert effect.index == len(self.emitted), "every index once, in order"
                assert effect.token_id != 6, "a repeated, early or stale token"
                self.emitted.append(effect.token_id)
            case ev.Requeue():
                self.queued = True
            case ev.LeaveQueue():
                assert self.queued
                self.queued = False
            case ev.EndStream():
                assert (effect.finish is None) == bool(effect.label)
                assert effect.usage.completion_tokens == len(self.emitted)
                self.ends.append(effect)
            case ev.Rebind():
                self.rebinding = True
            case ev.CancelDecode() | ev.CancelPrefill() | ev.SwitchLocal():
                assert effect.key in self.sent


@settings(max_examples=400)
@given(
    steps=st.lists(mostly_fitting, max_size=40),
    last=last_words,
)
def test_any_order_of_events_gives_one_end_and_every_token_once(steps: list[Any], last: ev.Event) -> None:
    run = Checked()
    for item in steps:
        run.apply(likely(run.state, *item) if isinstance(item, tuple) else item)
    run.apply(last)
    assert len(run.ends) == 1
    assert run.state.phase is Phase.DONE
    assert not run.decode_load
    assert not run.prefill_load
    assert not run.queued
