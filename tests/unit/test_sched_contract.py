"""What the roles may rely on: the order of events, stops, cancels, handover, copy-on-write, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.errors import ConfigError, InternalError
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.prefix import content_keys
from pdserve.sched.plan import (
    PageReady,
    Preempted,
    PromptDone,
    SeqFailed,
    SeqFinished,
    SeqKind,
    SeqSpec,
    SeqStopped,
    Started,
    StepResult,
    TokenSampled,
)
from pdserve.sched.scheduler import SchedConfig, pages_needed
from pdserve.types import FinishReason, SamplingParams
from tests.unit.sched_sim import Sim, oracle

CONFIG = SchedConfig(page_size=4, chunk_tokens=8, token_budget=16, max_num_seqs=4)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def _sim(num_pages: int = 20, **changes: object) -> Sim:
    return Sim(dataclasses.replace(CONFIG, **changes), num_pages)  # type: ignore[arg-type]


def test_prefill_only_tells_pages_then_prompt_done_then_the_token_and_ends() -> None:
    sim = _sim()
    sim.submit("a", PROMPT, kind=SeqKind.PREFILL_ONLY)
    sim.run()
    assert [type(event) for event in sim.log] == [
        Started,
        PageReady,
        PageReady,
        PageReady,
        PromptDone,
        TokenSampled,
        SeqFinished,
    ]
    rows = [
        (event.index, event.valid_rows, event.cached) for event in sim.log if isinstance(event, PageReady)
    ]
    assert rows == [(0, 4, False), (1, 4, False), (2, 2, False)]
    assert sim.log[-1] == SeqFinished(seq_id="a", reason=None)


@pytest.mark.parametrize(("max_tokens", "ends"), [(1, FinishReason.LENGTH), (2, None)])
def test_prefill_only_says_when_its_first_token_ends_the_request(
    max_tokens: int, ends: FinishReason | None
) -> None:
    sim = _sim()
    sim.submit("a", PROMPT, kind=SeqKind.PREFILL_ONLY, max_tokens=max_tokens)
    sim.run()
    assert sim.over["a"] == SeqFinished(seq_id="a", reason=ends)


def test_forced_tokens_keep_their_index_and_counter() -> None:
    sim = _sim()
    sampling = SamplingParams(max_tokens=6, seed=1)
    want = oracle(tuple(PROMPT), len(PROMPT), sampling)
    sim.submit("a", [*PROMPT, *want[:2]], num_prompt=len(PROMPT), max_tokens=6)
    sim.run()
    assert [event.index for event in sim.log if isinstance(event, TokenSampled)] == [2, 3, 4, 5]
    assert sim.tokens["a"] == want[2:]


def test_a_full_sequence_says_prompt_done_once_before_its_first_token() -> None:
    sim = _sim()
    sim.submit("a", PROMPT, max_tokens=3)
    sim.run()
    kinds = [type(event) for event in sim.log if not isinstance(event, PageReady)]
    assert kinds == [Started, PromptDone, TokenSampled, TokenSampled, TokenSampled, SeqFinished]


@pytest.mark.parametrize("length", [1, 9])
def test_a_prompt_with_one_row_to_compute_says_prompt_done_too(length: int) -> None:
    sim = _sim()
    sim.submit("warm", PROMPT)
    sim.run()
    sim.log.clear()
    sim.submit("a", PROMPT[:length], max_tokens=2)
    sim.run()
    assert [len(step.token_ids) for plan in sim.plans for step in plan.seqs if step.seq_id == "a"] == [1, 1]
    assert sum(isinstance(event, PromptDone) for event in sim.log) == 1


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("own_stop", [False, True])
def test_end_tokens_stop_unless_ignored_and_stop_tokens_always(ignore_eos: bool, own_stop: bool) -> None:
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=ignore_eos)
    want = oracle(tuple(PROMPT), len(PROMPT), sampling)
    stop = want[2]
    sampling = dataclasses.replace(sampling, stop_token_ids=(stop,) if own_stop else ())
    sim = _sim(end_token_ids=() if own_stop else (stop,))
    spec = SeqSpec(
        seq_id="a", kind=SeqKind.FULL, token_ids=tuple(PROMPT), num_prompt=10, sampling=sampling, arrival=0.0
    )
    sim.specs["a"] = spec
    sim.sched.submit(spec)
    sim.run()
    stops = own_stop or not ignore_eos
    first = want.index(stop)
    assert sim.tokens["a"] == (want[: first + 1] if stops else want)
    assert sim.over["a"] == SeqFinished(
        seq_id="a", reason=FinishReason.STOP if stops else FinishReason.LENGTH
    )


def test_pages_stay_held_until_the_role_drops_them() -> None:
    sim = _sim()
    sim.sched.submit(
        SeqSpec(
            seq_id="a",
            kind=SeqKind.PREFILL_ONLY,
            token_ids=tuple(PROMPT),
            num_prompt=10,
            sampling=SamplingParams(),
            arrival=0.0,
        )
    )
    while (plan := sim.sched.plan()) is not None:
        events = sim.sched.finish_step(sim.engine.execute(plan))
    assert isinstance(events[-1], SeqFinished)
    assert not sim.sched.has("a")
    assert len(sim.manager.drop_all(Holder(HolderKind.REQUEST, "a"))) == 3
    assert sim.manager.idle


def test_one_step_is_in_flight_at_a_time_and_only_its_result_is_taken() -> None:
    sim = _sim()
    sim.submit("a", PROMPT)
    plan = sim.sched.plan()
    assert plan is not None
    assert sim.sched.plan() is None
    with pytest.raises(InternalError):
        sim.sched.finish_step(StepResult(step_id=plan.step_id + 1, tokens={}))
    sim.sched.finish_step(sim.engine.execute(plan))
    with pytest.raises(InternalError):
        sim.sched.finish_step(StepResult(step_id=plan.step_id, tokens={}))


def test_cancel_stops_at_once_outside_a_step_and_with_an_event_inside() -> None:
    sim = _sim(max_num_seqs=1)
    sim.submit("running", PROMPT)
    sim.submit("waiting", PROMPT)
    sim.begin()
    assert sim.sched.cancel("running") is False
    assert sim.sched.cancel("running") is False
    assert sim.sched.has("running")
    assert sim.sched.cancel("waiting") is True
    assert not sim.sched.has("waiting")
    sim.over["waiting"] = None
    sim.end()
    assert sim.log[-1] == SeqStopped(seq_id="running")
    assert sim.tokens["running"] == []
    assert sim.sched.cancel("running") is True
    assert sim.manager.idle


def test_a_failed_sequence_fails_alone() -> None:
    sim = _sim()
    sim.submit("bad", PROMPT)
    sim.submit("good", PROMPT[::-1])
    sim.begin()
    sim.end(frozenset({"bad"}))
    sim.run()
    assert sim.over["bad"] == SeqFailed(seq_id="bad", message="made to fail")
    assert sim.tokens["good"] == oracle(tuple(PROMPT[::-1]), 10, sim.specs["good"].sampling)


def test_a_token_that_the_engine_forgot_fails_the_sequence() -> None:
    sim = _sim()
    sim.submit("a", PROMPT[:3])
    plan = sim.begin()
    assert plan is not None
    events = sim.sched.finish_step(StepResult(step_id=plan.step_id, tokens={}))
    assert [type(event) for event in events] == [SeqFailed]


def test_a_handed_over_sequence_decodes_at_once_and_computes_no_prompt_row() -> None:
    sim = _sim()
    assert sim.hand_over("a", PROMPT, max_tokens=5)
    sim.run()
    assert [len(step.token_ids) for plan in sim.plans for step in plan.seqs] == [1] * 4
    assert sim.plans[0].seqs[0].start == len(PROMPT)
    assert sim.tokens["a"] == oracle(tuple(PROMPT), 10, sim.specs["a"].sampling)
    assert not any(isinstance(event, PromptDone) for event in sim.log)
    assert [event.index for event in sim.log if isinstance(event, PageReady)] == [2]


def test_a_sealed_tail_is_copied_before_it_is_written() -> None:
    sim = _sim()
    assert sim.hand_over("a", PROMPT, max_tokens=5, seal_tail=True)
    (tail,) = sim.specs["a"].pages[2:]
    before = list(sim.engine.rows[tail])
    other = Holder(HolderKind.TRANSFER, "reader")
    sim.manager.hold(tail, other)
    while sim.step():
        pass
    assert sim.plans[0].copies[0][0] == tail
    assert sim.engine.rows[tail] == before
    assert sim.manager.state(tail) is PageState.SEALED
    assert sim.manager.holders(tail) == {other}
    assert sim.tokens["a"] == oracle(tuple(PROMPT), 10, sim.specs["a"].sampling)


def test_a_page_to_be_copied_is_nobody_elses_before_the_copy() -> None:
    sim = _sim(num_pages=5)
    assert sim.hand_over("a", PROMPT, max_tokens=2, seal_tail=True)
    sim.submit("b", [7, 7], max_tokens=2)
    sim.run()
    assert {step.seq_id for step in sim.plans[0].seqs} == {"a"}
    assert sim.tokens["a"] == oracle(tuple(PROMPT), 10, sim.specs["a"].sampling)


def test_a_shared_prefix_is_computed_once_and_told_as_cached() -> None:
    sim = _sim()
    sim.submit("a", PROMPT)
    sim.run()
    sim.log.clear()
    sim.submit("b", PROMPT)
    sim.run()
    assert sim.log[0] == Started(seq_id="b", hit_tokens=8)
    assert [(e.index, e.cached) for e in sim.log if isinstance(e, PageReady)][:2] == [(0, True), (1, True)]
    assert sim.tokens["b"] == sim.tokens["a"]


def test_a_hit_never_covers_the_whole_prompt() -> None:
    sim = _sim()
    sim.submit("a", PROMPT[:8], max_tokens=1)
    sim.run()
    sim.submit("b", PROMPT[:8], max_tokens=1)
    sim.run()
    assert [event.hit_tokens for event in sim.log if isinstance(event, Started)] == [0, 4]


@pytest.mark.parametrize("how", ["other_salt", "not_used", "switched_off"])
def test_prefixes_are_not_shared_where_they_must_not_be(how: str) -> None:
    sim = _sim(prefix_caching=how != "switched_off")
    sim.submit("a", PROMPT, cache_salt=b"one")
    sim.run()
    salt = b"two" if how == "other_salt" else b"one"
    sim.submit("b", PROMPT, cache_salt=salt, use_prefix_cache=how != "not_used")
    sim.run()
    assert [event.hit_tokens for event in sim.log if isinstance(event, Started)] == [0, 0]


def test_published_pages_are_found_under_the_content_keys_of_the_config() -> None:
    sim = _sim(model="digest", numerics="fp32")
    sim.submit("a", PROMPT, cache_salt=b"tenant")
    sim.run()
    keys = content_keys(PROMPT, 4, salt=b"tenant", model="digest", numerics="fp32")
    ready = [event.page for event in sim.log if isinstance(event, PageReady)]
    assert sim.manager.match(keys) == tuple(ready[:2])


def test_the_youngest_gives_way_and_goes_on_exactly() -> None:
    sim = _sim(num_pages=8, prefix_caching=False, token_budget=32)
    prompts = {"a": PROMPT[:8], "b": PROMPT[1:9], "c": PROMPT[2:6]}
    for seq_id, prompt in prompts.items():
        sim.submit(seq_id, prompt, max_tokens=12)
    sim.run()
    preempted = [event.seq_id for event in sim.log if isinstance(event, Preempted)]
    assert preempted[0] == "c"
    assert "a" not in preempted
    for seq_id, prompt in prompts.items():
        assert sim.tokens[seq_id] == oracle(tuple(prompt), len(prompt), sim.specs[seq_id].sampling)


def test_preemption_leaves_transfer_holders_alone() -> None:
    sim = _sim(num_pages=6, prefix_caching=False, chunk_tokens=2)
    sim.submit("old", PROMPT[:7], max_tokens=8)
    while not sim.tokens["old"]:
        assert sim.step()
    sim.submit("young", [*PROMPT, 1, 2], kind=SeqKind.PREFILL_ONLY)
    while Preempted(seq_id="young") not in sim.log:
        assert sim.step()
    held = sim.manager.pages_of(Holder(HolderKind.TRANSFER, "young"))
    assert held
    assert all(sim.manager.state(page) is PageState.SEALED for page in held)
    assert sim.manager.pages_of(Holder(HolderKind.REQUEST, "young")) == ()
    sim.run()
    assert set(sim.over) == {"old", "young"}


def test_reservations_leave_the_floor_to_prompts_computed_here() -> None:
    sim = _sim(num_pages=6, floor_pages=3)
    holder = Holder(HolderKind.REQUEST, "later")
    assert sim.sched.reserve(4, holder) is None
    assert sim.sched.reserve(3, holder) is not None
    sim.submit("a", PROMPT, max_tokens=1)
    assert sim.step()


def test_what_never_fits_is_known_beforehand() -> None:
    sim = _sim(num_pages=5)
    assert pages_needed(len(PROMPT), 10, 4) == 5
    assert pages_needed(len(PROMPT), 11, 4) == 6
    sim.submit("a", PROMPT, max_tokens=10)
    sim.run()
    assert len(sim.tokens["a"]) == 10


def test_counts_follow_the_sequences() -> None:
    sim = _sim(max_num_seqs=1)
    sim.submit("a", PROMPT)
    sim.submit("b", PROMPT[:3])
    assert (sim.sched.num_running, sim.sched.num_waiting, sim.sched.waiting_tokens) == (0, 2, 13)
    sim.step()
    assert (sim.sched.num_running, sim.sched.num_waiting, sim.sched.waiting_tokens) == (1, 1, 2 + 3)
    assert len(sim.sched.pages_of("a")) == 3
    assert sim.sched.pages_of("b") == sim.sched.pages_of("nobody") == ()


GOOD = SeqSpec(
    seq_id="a",
    kind=SeqKind.FULL,
    token_ids=(1, 2),
    num_prompt=2,
    sampling=SamplingParams(max_tokens=2),
    arrival=0.0,
)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": ()},
        {"num_prompt": 3},
        {"num_prompt": 0},
        {"num_computed": 1},
        {"num_computed": 2, "pages": (0,)},
        {"num_shared": 1},
        {"token_ids": (1, 2, 3, 4)},
    ],
)
def test_a_spec_that_can_not_run_is_refused(change: dict[str, object]) -> None:
    sim = _sim()
    with pytest.raises(InternalError):
        sim.sched.submit(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert not sim.sched.has("a")


def test_a_live_id_is_refused() -> None:
    sim = _sim()
    sim.sched.submit(GOOD)
    with pytest.raises(InternalError):
        sim.sched.submit(GOOD)


@pytest.mark.parametrize("field", ["page_size", "chunk_tokens", "token_budget", "max_num_seqs"])
def test_a_config_without_room_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(CONFIG, **{field: 0})
