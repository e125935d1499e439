"""Rows of the decode side that need pages and a scheduler: D1, D10, D14, and the rows it computes itself."""

from __future__ import annotations

from typing import Any

from decode_worker.entry import PromptWork
from kvtransfer.session.decode import DState
from pdserve.kvcache.allocator import PageState
from pdserve.messages import Refusal
from pdserve.sched.plan import PageReady, StepResult
from tests.unit.role_kit import SIZE, Decode, L, key, of, prompt, reserve_call


def ready(index: int, *, cached: bool = False) -> PageReady:
    return PageReady(seq_id="D:r", index=index, page=index, valid_rows=SIZE, cached=cached)


def steps(decode: Decode, started: list[Any]) -> list[Any]:
    """Carries out all steps from the RunStep in `started` on; every sample is token 7."""
    seen = list(started)
    while plans := of(started, "RunStep"):
        (step,) = plans
        tokens = {seq.seq_id: 7 for seq in step.plan.seqs if seq.sample}
        started = decode.core.step_done(StepResult(step_id=step.plan.step_id, tokens=tokens), 0.0)
        seen += started
    return seen


def test_d1_what_fits_no_pool_is_refused_and_what_fits_later_may_come_again() -> None:
    decode = Decode(num_pages=6)
    assert of(decode.role.reserve(reserve_call(key()), 0.0), "Reserved")
    (full,) = of(decode.role.reserve(reserve_call(key(0, "other")), 0.0), "Refused")
    assert (full.reason, full.retry_after_s > 0) == (Refusal.FULL, True)
    (never,) = of(Decode(num_pages=5).role.reserve(reserve_call(key()), 0.0), "Refused")
    assert never.reason is Refusal.NEVER_FITS


def test_d10_the_youngest_gives_way_and_what_it_computes_again_is_counted() -> None:
    decode = Decode(num_pages=9)
    old = reserve_call(key(0, "old"), prefill=None)
    young = reserve_call(key(0, "young"), prefill=None, tokens=prompt(16))
    decode.role.reserve(old, 0.0)
    decode.role.reserve(young, 1.0)
    seen = steps(decode, decode.core.settle([], 1.0))
    ends = {e.key.request_id: e for e in of(seen, "Ended")}
    assert ends["old"].ledger.num_retractions == 0
    assert ends["young"].ledger.num_retractions >= 1
    assert ends["old"].ledger.decode_computed_prompt_tokens == 14
    assert ends["young"].ledger.decode_computed_prompt_tokens >= 16
    for name in ("old", "young"):
        indices = [t.index for t in of(seen, "Token") if t.key.request_id == name]
        assert indices == list(range(8)), "each index once, in order, whatever was computed again"


def test_rows_of_the_prompt_are_counted_as_often_as_they_are_computed() -> None:
    work = PromptWork(num_tokens=14, page_size=SIZE)
    work.begin(4)
    work.started(0)
    work.sealed(ready(1))
    assert work.rows == 4, "a prompt under way"
    work.done()
    assert work.rows == 10
    work.sealed(ready(3))
    assert work.rows == 10, "decode fills the last prompt page; that is no prompt row"
    work.retracted()
    work.started(8)
    work.sealed(ready(2))
    work.retracted()
    work.started(12)
    work.done()
    assert work.rows == 10 + 4 + 2
    assert work.first_hits == 0


def test_a_handed_over_prompt_counts_nothing_until_it_is_retracted() -> None:
    work = PromptWork(num_tokens=14, page_size=SIZE)
    work.started(0)
    work.sealed(ready(3))
    assert (work.rows, work.local) == (0, False)
    work.retracted()
    work.started(8)
    work.done()
    assert work.rows == 6


def test_d14_a_read_that_does_not_end_quarantines_its_page_and_nothing_else() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key()), 0.0)
    reading = decode.announce(key(), 0)
    (read,) = of(reading, "StartRead")
    decode.role.cancel(key(), 0.0)
    assert [type(e).__name__ for e in decode.role.tick(L)] == ["CancelRead"]
    assert decode.pages.state(read.target_page) is not PageState.QUARANTINED
    decode.role.tick(2 * L)
    assert decode.pages.state(read.target_page) is PageState.QUARANTINED
    assert decode.role._entries[key()].session.state is DState.CLOSING
    decode.read(reading, now=3 * L)
    assert decode.role.num_live == 0
    assert decode.pages.state(read.target_page) is PageState.QUARANTINED, "never used again"
    assert decode.pages.available == decode.pages.num_pages - 1


def test_a_forced_token_is_never_sent_again() -> None:
    decode = Decode()
    forced = (*prompt(14), 7, 7, 7)
    call = reserve_call(key(), prefill=None, tokens=forced, num_forced=3)
    decode.role.reserve(call, 0.0)
    seen = steps(decode, decode.core.settle([], 0.0))
    assert [t.index for t in of(seen, "Token")] == [3, 4, 5, 6, 7]
