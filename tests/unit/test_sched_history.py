"""What a step that samples knows of the tokens before: all of them where they matter, nothing where not."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.sched.plan import History, Preempted, SeqFailed, StepResult
from pdserve.sched.sequence import needs_history
from pdserve.types import Grammar, GrammarKind, SamplingParams
from tests.unit.sched_sim import SchedConfig, Sim, oracle

NEEDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": -0.5},
    {"frequency_penalty": 0.1},
    {"min_tokens": 1},
    {"bad_words": ((1, 2),)},
    {"grammar": Grammar(kind=GrammarKind.REGEX, text="a")},
]
PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "seed": 7},
    {"logit_bias": ((1, 2.0),), "logprobs": 20, "stop_token_ids": (3,), "ignore_eos": True},
]


def sim_of(num_pages: int = 32) -> Sim:
    config = SchedConfig(
        page_size=4, chunk_tokens=4, token_budget=32, max_num_seqs=8, deterministic=True,
        end_token_ids=(), model="m", numerics="n", prefix_caching=False,
    )  # fmt: skip
    return Sim(config, num_pages)


@pytest.mark.parametrize("fields", NEEDS)
def test_what_depends_on_earlier_tokens(fields: dict[str, Any]) -> None:
    assert needs_history(SamplingParams(**fields))


@pytest.mark.parametrize("fields", PLAIN)
def test_plain_requests_pay_nothing(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=3, **fields)
    assert not needs_history(sampling)
    sim = sim_of()
    sim.submit("a", [5, 6, 7], sampling=sampling)
    sim.run()
    assert all(step.history is None for plan in sim.plans for step in plan.seqs)


def test_each_sampling_step_has_all_tokens_so_far_also_after_a_preemption() -> None:
    sim = sim_of(num_pages=8)
    prompts = {"a": [9, 8, 7, 6, 5, 4, 3, 2], "b": [1, 2, 3, 4, 5, 6, 7, 8], "c": [4, 4, 4, 4]}
    forced = {"a": 0, "b": 2, "c": 1}
    for name, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=12, seed=len(name), min_tokens=1)
        sim.submit(name, prompt, sampling=sampling, num_prompt=len(prompt) - forced[name])
    sim.run()
    assert any(isinstance(event, Preempted) for event in sim.log)
    for name, prompt in prompts.items():
        num_prompt = len(prompt) - forced[name]
        whole = [*prompt[:num_prompt], *oracle(tuple(prompt), num_prompt, sim.specs[name].sampling)]
        steps = [step for plan in sim.plans for step in plan.seqs if step.seq_id == name]
        for step in steps:
            if not step.sample:
                assert step.history is None
                continue
            end = step.start + len(step.token_ids)
            assert step.history == History(token_ids=tuple(whole[:end]), num_prompt=num_prompt)
            assert step.sample_counter == end - num_prompt


def test_a_request_for_what_can_not_be_is_the_request_s_fault() -> None:
    for refused, label in ((frozenset({"a"}), "invalid_request"), (frozenset(), "internal")):
        sim = sim_of()
        sim.submit("a", [5, 6, 7])
        plan = sim.sched.plan()
        assert plan is not None
        result = StepResult(step_id=plan.step_id, tokens={}, failed={"a": "why"}, refused=refused)
        assert sim.sched.finish_step(result) == [SeqFailed(seq_id="a", message="why", label=label)]
