"""A prefill worker that refuses is replaced; the decode worker keeps what it holds for the request."""

from __future__ import annotations

import pytest

from pdserve.messages import Refusal, Refused
from pdserve.types import HandoverMode
from router import events as ev
from tests.unit.test_router_lifecycle import D, P, fresh, key, kinds, reserved, run, running, token


def p_refused(reason: Refusal = Refusal.DRAINING, epoch: int = 0) -> ev.PrefillRefused:
    return ev.PrefillRefused(refused=Refused(key=key(epoch), reason=reason))


@pytest.mark.parametrize("early", [True, False])
def test_a_prefill_worker_that_refuses_is_replaced_while_decode_keeps_its_pages(early: bool) -> None:
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]))
    run(state, *([] if early else [reserved()]))
    release, rebind = run(state, p_refused())
    assert rebind == ev.Rebind(key=key(0), decode=D[0], avoid=frozenset({P[0].incarnation}))
    effects = run(state, ev.Rebound(key=key(0), prefill=P[1]))
    assert kinds([release, *effects]) == [
        ev.ReleasePrefill, ev.ReleaseDecode, ev.SendReserve, ev.SendPrefill,
    ]  # fmt: skip
    assert state.key == key(1)
    assert state.num_tries == 0, "nothing was started: no try has failed"
    assert run(state, reserved(0), token(0, epoch=0)) == [], "the lower key says nothing any more"
    assert run(state, reserved(1), token(0, epoch=1))[-1] == ev.Emit(index=0, token_id=5)


@pytest.mark.parametrize("early", [True, False])
def test_without_another_prefill_worker_decode_computes_the_prompt(early: bool) -> None:
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]))
    run(state, *([] if early else [reserved()]))
    run(state, p_refused(Refusal.FULL))
    effects = run(state, ev.Rebound(key=key(0), prefill=None))
    if early:
        effects += run(state, reserved())
    assert effects == [ev.SwitchLocal(key=key(0), decode=D[0])]


def test_decode_that_chose_to_prefill_meanwhile_is_left_alone() -> None:
    state = fresh()
    run(state, ev.Assigned(decode=D[0], prefill=P[0]), p_refused(), reserved(mode=HandoverMode.LOCAL))
    assert run(state, ev.Rebound(key=key(0), prefill=P[1])) == []
    assert run(state, token(0))[-1] == ev.Emit(index=0, token_id=5)


def test_a_refusal_that_others_would_repeat_is_not_taken_elsewhere() -> None:
    assert kinds(run(running(0), p_refused(Refusal.BAD_TICKET))) == [ev.ReleasePrefill, ev.SwitchLocal]


def test_decode_that_refuses_the_rebound_epoch_ends_the_lower_one_with_it() -> None:
    state = running(0)
    run(state, p_refused(), ev.Rebound(key=key(0), prefill=P[1]))
    effects = run(state, Refused(key=key(1), reason=Refusal.FULL))
    assert ev.CancelDecode(key=key(1), decode=D[0]) in effects, "a cancel ends every lower key too"
    assert isinstance(effects[-1], ev.Requeue)
