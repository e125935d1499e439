"""What is quick between a prompt's last step and decode's first one: digests that come with the step, and
bookkeeping that waits until messages and steps are out."""

from __future__ import annotations

from typing import Any

from kvtransfer.session.decode import DState
from pdserve.kvcache.allocator import CACHE, Holder, HolderKind
from pdserve.messages import Grant, Outcome
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.types import HandoverMode
from pdserve.worker.core import REST_S
from tests.unit.role_kit import SIZE, Decode, Prefill, digest, key, of, prefill_call, prompt, reserve_call

PAGES = -(-len(prompt()) // SIZE)


def computing() -> tuple[Prefill, StepPlan]:
    """A prompt with all its pages granted, right before its last step ends."""
    prefill = Prefill()
    call = prefill_call(key())
    prefill.role.prefill(call, 0.0)
    grant = Grant(key=key(), want=tuple(range(PAGES)), credit=PAGES, ticket=call.ticket)
    effects = prefill.core.settle(prefill.said(grant), 0.0)
    while True:
        (step,) = of(effects, "RunStep")
        if step.plan.seqs[0].sample:
            return prefill, step.plan
        effects = prefill.core.step_done(StepResult(step_id=step.plan.step_id, tokens={}), 0.0)


def ended(prefill: Prefill, plan: StepPlan) -> list[Any]:
    tokens = {seq.seq_id: 5 for seq in plan.seqs}
    return prefill.core.step_done(StepResult(step_id=plan.step_id, tokens=tokens), 0.0)


def test_a_page_whose_digest_came_with_its_step_is_announced_at_once() -> None:
    prefill, plan = computing()
    (seq,) = plan.seqs
    last = seq.start // SIZE
    assert prefill.role.computed([(seq.pages[last], last, digest(last))]) == []
    effects = ended(prefill, plan)
    assert [(a.index, a.digest) for a in of(effects, "Announce")] == [(last, digest(last))]
    assert not of(effects, "ComputeDigest")


def test_without_it_the_page_is_digested_first() -> None:
    prefill, plan = computing()
    effects = ended(prefill, plan)
    assert not of(effects, "Announce")
    assert [asked.index for asked in of(effects, "ComputeDigest")] == [plan.seqs[0].start // SIZE]


def test_the_prompts_own_hold_goes_when_its_messages_are_out() -> None:
    prefill, plan = computing()
    pages = plan.seqs[0].pages
    mine = Holder(HolderKind.REQUEST, plan.seqs[0].seq_id)
    prefill.role.computed([(pages[i], i, digest(i)) for i in range(PAGES)])
    for index in range(PAGES - 1):
        name = prefill.pages.name(pages[index])
        prefill.role.digested(key(), index, name, digest(index), 0.0)
    assert of(ended(prefill, plan), "Finish")
    assert prefill.pages.pages_of(mine) == pages
    prefill.core.tick(REST_S)
    assert prefill.pages.pages_of(mine) == ()


def test_a_worker_is_not_drained_while_something_is_put_off() -> None:
    prefill, plan = computing()
    ended(prefill, plan)
    prefill.role.cancel(key(), 0.0)
    assert prefill.role.num_live == 0
    assert not prefill.core.drained
    prefill.core.tick(REST_S)
    assert prefill.core.drained
    assert prefill.core.idle


def handed_over() -> Decode:
    """A request whose last page came, with the effects of that input not carried out yet."""
    decode = Decode()
    decode.role.reserve(reserve_call(key()), 0.0)
    decode.core.settle(decode.verify(key(), *range(PAGES)), 0.0)
    effects = decode.core.settle(decode.finish(key(), tuple(range(PAGES))), 0.0)
    decode.started = of(effects, "RunStep")
    assert len(decode.started) == 1
    return decode


def cached(decode: Decode) -> int:
    return sum(CACHE in decode.pages.holders(page) for page in range(decode.pages.num_pages))


def test_pages_are_offered_to_the_cache_once_the_first_step_is_out() -> None:
    decode = handed_over()
    assert cached(decode) == 0
    assert 0.0 < decode.core.next_timer() <= REST_S
    decode.core.tick(REST_S)
    assert cached(decode) == len(prompt()) // SIZE
    decode.core.tick(REST_S)
    assert decode.core.check_integrity() == ""


def test_pages_that_went_meanwhile_are_not_offered() -> None:
    decode = handed_over()
    (entry,) = decode.role._entries.values()
    assert entry.session.state is DState.RUNNING
    decode.pages.drop_all(Holder(HolderKind.REQUEST, "D:" + str(key())))
    decode.scheduler._roster.remove(decode.scheduler._roster.get("D:" + str(key())))  # as a preemption does
    decode.core.tick(REST_S)
    assert cached(decode) == 0
    assert decode.core.check_integrity() == ""


def test_a_preempted_sequence_that_gets_the_very_same_pages_offers_nothing() -> None:
    decode = handed_over()
    (entry,) = decode.role._entries.values()
    holder = Holder(HolderKind.REQUEST, "D:" + str(key()))
    decode.pages.drop_all(holder)  # they are free, and taken again for rows that are not computed yet
    taken = decode.pages.reserve(decode.pages.available, holder)
    assert taken is not None
    assert set(entry.held.pages) <= set(taken)
    for page in taken:
        decode.pages.fill(page)
    decode.core.tick(REST_S)
    assert cached(decode) == 0


def test_a_request_that_ends_before_its_pages_were_offered_offers_them_then() -> None:
    decode = handed_over()
    outcome, _ = decode.role.cancel(key(), 0.0)
    assert outcome is Outcome.STOPPING
    (step,) = decode.started
    decode.core.step_done(StepResult(step_id=step.plan.step_id, tokens={}), 0.0)
    assert not decode.role._entries
    assert cached(decode) == len(prompt()) // SIZE
    assert decode.core.check_integrity() == ""


def test_a_request_that_decode_computes_itself_is_not_touched_by_this() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key(), prefill=None), 0.0)
    assert of(decode.core.settle([], 0.0), "RunStep")
    (entry,) = decode.role._entries.values()
    assert entry.held.mode is HandoverMode.LOCAL
    assert not decode.role.put_off
