"""The guards of protocol.md §9, in order, on both sides: tickets, tombstones, higher keys, duplicates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.session.decode import DState
from kvtransfer.session.prefill import PState
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.messages import Abort, Commit, Grant, Outcome, Refusal, Renew
from pdserve.sched.plan import StepResult
from pdserve.worker.core import REST_S
from tests.unit.role_kit import P2, D, Decode, L, P, Prefill, key, of, prefill_call, reserve_call

WANT = (0, 1, 2, 3)


def grant(at: int = 0, **changes: Any) -> Grant:
    call = prefill_call(key(at))
    made = Grant(key=key(at), want=WANT, credit=4, ticket=call.ticket)
    return replace(made, **changes)


def outcome_of(effects: list[Any], kind: str) -> list[Outcome]:
    return [message.outcome for message in of(effects, kind)]


# ---- guard 1: ticket and receiver --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"receiver_incarnation": 99}, Refusal.STALE_INCARNATION),
        ({"ticket": b"forged" * 20}, Refusal.BAD_TICKET),
        ({"token_ids": (1, 2, 3)}, Refusal.BAD_TICKET),
        ({"tenant": "another"}, Refusal.BAD_TICKET),
        ({"key": key(1)}, Refusal.BAD_TICKET),
    ],
)
def test_guard_1_a_call_that_its_ticket_does_not_cover_is_refused(
    change: dict[str, Any], reason: Refusal
) -> None:
    for refused in (
        of(Decode().role.reserve(replace(reserve_call(key()), **change), 0.0), "Refused"),
        of(Prefill().role.prefill(replace(prefill_call(key()), **change), 0.0), "Refused"),
    ):
        assert [r.reason for r in refused] == [reason]


def test_guard_1_a_grant_is_taken_only_from_the_worker_that_its_ticket_names() -> None:
    prefill = Prefill()
    for peer, incarnation in (("another", D.incarnation), (D.worker_id, 99)):
        effects = prefill.role.message(peer, incarnation, grant(), 0.0)
        assert [e.name for e in of(effects, "Count")] == ["refused_tickets"]
    assert prefill.role.num_live == 0


def test_guard_1_an_expired_ticket_is_refused_and_ends_what_it_carries() -> None:
    late = prefill_call(key(), expires=50.0)
    prefill = Prefill()
    prefill.role.prefill(replace(late, deadline_s=1000.0), 0.0)
    prefill.said(replace(grant(), ticket=late.ticket))
    assert outcome_of(prefill.role.tick(50.0), "Prefilled") == [Outcome.EXPIRED]
    assert [r.reason for r in of(prefill.role.prefill(late, 51.0), "Refused")] == [Refusal.BAD_TICKET]
    decode = Decode()
    decode.role.reserve(replace(reserve_call(key(), expires=50.0), deadline_s=1000.0), 0.0)
    for now in (9.0, 18.0, 27.0, 36.0, 45.0):
        decode.role.message(P.worker_id, P.incarnation, Renew(keys=(key(),), answer=True), now)
    (ended,) = of(decode.role.tick(50.0), "Ended")
    assert ended.error_label == "deadline_expired"


# ---- guard 2: what ended stays ended ----------------------------------------------------------------------


def test_guard_2_a_replayed_call_gets_the_recorded_answer_and_has_no_effect() -> None:
    decode, prefill = Decode(), Prefill()
    decode.role.reserve(reserve_call(key()), 0.0)
    decode.role.cancel(key(), 0.0)
    (refused,) = of(decode.role.reserve(reserve_call(key()), 1.0), "Refused")
    assert refused.reason is Refusal.OUTDATED_KEY
    prefill.role.prefill(prefill_call(key()), 0.0)
    prefill.role.cancel(key(), 0.0)
    assert outcome_of(prefill.role.prefill(prefill_call(key()), 1.0), "Prefilled") == [Outcome.STOPPED]
    assert outcome_of(prefill.said(grant()), "Abort") == [Outcome.STOPPED]
    assert decode.core.idle
    assert prefill.core.idle


def test_guard_2_a_cancel_that_overtakes_its_call_is_remembered() -> None:
    decode, prefill = Decode(), Prefill()
    assert decode.role.cancel(key(), 0.0)[0] is Outcome.NEVER_STARTED
    assert prefill.role.cancel(key(), 0.0)[0] is Outcome.NEVER_STARTED
    assert of(decode.role.reserve(reserve_call(key()), 0.1), "Reserved") == []
    (prefilled,) = of(prefill.role.prefill(prefill_call(key()), 0.1), "Prefilled")
    assert prefilled.outcome is Outcome.NEVER_STARTED
    assert of(decode.role.reserve(reserve_call(key(1)), 0.1), "Reserved"), "a higher key is another try"


def test_guard_2_a_lower_cancel_has_no_effect_on_a_higher_key() -> None:
    decode, prefill = Decode(), Prefill()
    decode.role.reserve(reserve_call(key(1)), 0.0)
    prefill.role.prefill(prefill_call(key(1)), 0.0)
    for role in (decode.role, prefill.role):
        assert role.cancel(key(0), 0.0) == (Outcome.SUPERSEDED, [])
        assert role.num_live == 1
    assert decode.role.switch_local(key(0), 0.0) == (Outcome.UNKNOWN, [])


def test_guard_2_lower_calls_and_grants_are_outdated_while_a_higher_key_lives() -> None:
    decode, prefill = Decode(), Prefill()
    decode.role.reserve(reserve_call(key(1)), 0.0)
    (refused,) = of(decode.role.reserve(reserve_call(key(0)), 0.0), "Refused")
    assert refused.reason is Refusal.OUTDATED_KEY
    prefill.role.prefill(prefill_call(key(1)), 0.0)
    (refused,) = of(prefill.role.prefill(prefill_call(key(0)), 0.0), "Refused")
    assert refused.reason is Refusal.OUTDATED_KEY
    assert outcome_of(prefill.said(grant(0)), "Abort") == [Outcome.SUPERSEDED]
    assert prefill.role.num_live == 1


def test_guard_2_after_the_tombstone_the_ticket_itself_is_refused() -> None:
    decode = Decode()
    call = reserve_call(key(), expires=50.0)
    decode.role.reserve(call, 0.0)
    decode.role.cancel(key(), 0.0)
    decode.role.tick(50.0)
    (refused,) = of(decode.role.reserve(call, 50.0), "Refused")
    assert refused.reason is Refusal.BAD_TICKET


# ---- guard 3: a higher key --------------------------------------------------------------------------------


def test_guard_3_a_higher_key_ends_the_lower_one_on_prefill_by_either_half() -> None:
    for half in ("call", "grant"):
        prefill = Prefill()
        prefill.role.prefill(prefill_call(key(0)), 0.0)
        if half == "call":
            effects = prefill.role.prefill(prefill_call(key(1)), 0.0)
        else:
            effects = prefill.said(grant(1))
        assert outcome_of(effects, "Prefilled") == [Outcome.SUPERSEDED]
        assert list(prefill.role._entries) == [key(1)]


def test_guard_3_a_superseded_key_that_still_computes_is_not_taken_up_again() -> None:
    prefill = Prefill()
    prefill.role.prefill(prefill_call(key(0)), 0.0)
    effects = prefill.core.settle(prefill.said(grant(0)), 0.0)
    (step,) = of(effects, "RunStep")
    prefill.core.drain()
    prefill.role.prefill(prefill_call(key(1)), 0.0)  # refused, and yet it ends the lower one
    assert outcome_of(prefill.said(grant(0)), "Abort") == [Outcome.SUPERSEDED]
    assert [e.session.state for e in prefill.role._entries.values()] == [PState.CLOSING]
    prefill.core.step_done(StepResult(step_id=step.plan.step_id, tokens={}), 0.0)
    prefill.core.tick(REST_S)
    assert prefill.core.idle


# ---- guard 4: duplicates ----------------------------------------------------------------------------------


def test_guard_4_the_same_call_again_changes_nothing() -> None:
    prefill = Prefill()
    for _ in range(2):
        prefill.role.prefill(prefill_call(key()), 0.0)
        prefill.said(grant())
    (entry,) = prefill.role._entries.values()
    assert entry.session.state is PState.QUEUED
    assert prefill.scheduler.num_waiting == 1


def test_guard_4_finish_again_is_committed_again_also_after_the_end() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key()), 0.0)
    decode.verify(key(), *WANT)
    assert len(of(decode.finish(key(), WANT), "Commit")) == 1
    assert len(of(decode.finish(key(), WANT), "Commit")) == 1
    decode.role.cancel(key(), 0.0)
    late = decode.finish(key(), WANT)
    assert outcome_of(late, "Abort") == [Outcome.STOPPED], "the transfer was complete, the request is not"
    assert of(late, "Finish") == []


# ---- renewals ---------------------------------------------------------------------------------------------


def test_a_key_that_decode_misses_twice_is_lost_on_prefill() -> None:
    prefill = Prefill()
    prefill.role.prefill(prefill_call(key()), 0.0)
    prefill.said(grant())
    other = Renew(keys=(key(request_id="other"),))
    assert outcome_of(prefill.said(other, L / 3), "Prefilled") == []
    prefill.said(Renew(keys=(key(),)), L / 2)
    assert outcome_of(prefill.said(other, 2 * L / 3), "Prefilled") == [], "once more is not twice in a row"
    assert outcome_of(prefill.said(other, L), "Prefilled") == [Outcome.EXPIRED]


def test_a_key_that_prefill_misses_twice_is_computed_by_decode() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key()), 0.0)
    (entry,) = decode.role._entries.values()
    for expected in (DState.PULL, DState.LOCAL):
        decode.role.message(P.worker_id, P.incarnation, Renew(keys=(), answer=True), L / 3)
        assert entry.session.state is expected


# ---- what the pool can not hold ---------------------------------------------------------------------------


def shrink(pages: Any, count: int) -> None:
    for page in pages.reserve(count, Holder(HolderKind.REQUEST, "stuck")) or ():
        pages.quarantine(page)


def test_a_prompt_larger_than_the_pool_outside_quarantine_is_refused_whichever_half_comes_first() -> None:
    for grant_first in (False, True):
        prefill = Prefill(num_pages=5)
        shrink(prefill.pages, 2)
        if grant_first:
            prefill.said(grant())
        effects = prefill.role.prefill(prefill_call(key()), 0.0)
        assert [r.reason for r in of(effects, "Refused")] == [Refusal.NEVER_FITS]
        assert outcome_of(effects, "Abort") == ([Outcome.NEVER_STARTED] if grant_first else [])
        assert prefill.role.num_live == 0


def test_waiting_requests_are_checked_again_when_a_page_is_quarantined() -> None:
    prefill, decode = Prefill(num_pages=5), Decode(num_pages=8)
    prefill.role.prefill(prefill_call(key()), 0.0)
    prefill.said(grant())
    shrink(prefill.pages, 2)
    assert outcome_of(prefill.core.settle([], 0.0), "Prefilled") == [Outcome.NEVER_STARTED]
    decode.role.reserve(reserve_call(key(), prefill=None), 0.0)
    shrink(decode.pages, 3)
    (ended,) = of(decode.core.settle([], 0.0), "Ended")
    assert (ended.error_label, ended.retryable) == ("unavailable", True)


def test_a_transfer_message_of_another_peer_has_no_effect() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key()), 0.0)
    assert decode.announce(key(), 0, peer=P2) == []
    prefill = Prefill()
    prefill.role.prefill(prefill_call(key()), 0.0)
    prefill.said(grant())
    for message in (Commit(key=key()), Abort(key=key(), outcome=Outcome.EXPIRED)):
        assert prefill.role.message("another", 99, message, 0.0) == []
    assert prefill.role.num_live == 1
