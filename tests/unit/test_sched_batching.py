"""How steps are filled: decode first, chunk borders, budgets, order of service, nobody starves."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.sched.plan import Preempted, SeqKind, StepPlan
from pdserve.sched.scheduler import SchedConfig
from pdserve.sched.sequence import PATIENCE_S
from tests.unit.sched_sim import Sim

CONFIG = SchedConfig(page_size=4, chunk_tokens=8, token_budget=20, max_num_seqs=8, prefix_caching=False)


def _sim(num_pages: int = 200, **changes: object) -> Sim:
    return Sim(dataclasses.replace(CONFIG, **changes), num_pages)  # type: ignore[arg-type]


def _rows(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(step.seq_id, step.start, len(step.token_ids)) for step in plan.seqs]


def _chunks(sim: Sim, seq_id: str) -> list[tuple[int, int]]:
    return [(start, rows) for plan in sim.plans for name, start, rows in _rows(plan) if name == seq_id]


def test_decode_rows_come_first_and_chunks_fill_the_rest_in_order_of_arrival() -> None:
    sim = _sim()
    sim.submit("a", [1, 2, 3])
    sim.step()
    sim.submit("b", [1] * 30)
    sim.submit("c", [2] * 30)
    sim.submit("d", [3] * 30)
    sim.step()
    assert _rows(sim.plans[1]) == [("a", 3, 1), ("b", 0, 8), ("c", 0, 8), ("d", 0, 3)]
    sim.step()
    assert _rows(sim.plans[2])[:3] == [("a", 4, 1), ("b", 8, 8), ("c", 8, 8)]


def test_deterministic_chunks_wait_rather_than_shrink() -> None:
    sim = _sim(deterministic=True)
    for index, name in enumerate("abc"):
        sim.submit(name, [index] * 30)
    sim.step()
    assert _rows(sim.plans[0]) == [("a", 0, 8), ("b", 0, 8)]


@pytest.mark.parametrize("chunk_tokens", [8, 6, 3, 2])
@pytest.mark.parametrize("length", range(3, 24))
def test_a_prompt_is_computed_however_large_pages_are_beside_its_tail(length: int, chunk_tokens: int) -> None:
    sim = _sim(chunk_tokens=chunk_tokens, tail_tokens=1, token_budget=chunk_tokens + 3)
    for name in ("a", "behind"):
        sim.submit(name, [1] * length, kind=SeqKind.PREFILL_ONLY)
    for _ in range(40):
        sim.step()
    for name in ("a", "behind"):
        assert min(rows for _, rows in _chunks(sim, name)) > 0
        assert sum(rows for _, rows in _chunks(sim, name)) == length


def test_deterministic_chunks_that_run_already_wait_too() -> None:
    sim = _sim(deterministic=True, token_budget=16)
    sim.submit("a", [1] * 30)
    sim.submit("b", [2] * 30)
    sim.step()
    sim.hand_over("c", [3] * 5)
    sim.step()
    assert _rows(sim.plans[1]) == [("c", 5, 1), ("a", 8, 8)]


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (8, [8]),  # one chunk stays one
        (12, [8, 4]),  # short enough
        (13, [10, 3]),  # whole pages before it
        (16, [14, 2]),
        (17, [8, 8, 1]),
        (24, [8, 14, 2]),
    ],
)
def test_a_prompt_that_is_handed_over_ends_with_a_short_chunk(length: int, chunks: list[int]) -> None:
    sim = _sim(page_size=2, tail_tokens=2)
    sim.submit("handed over", [1] * length, kind=SeqKind.PREFILL_ONLY)
    sim.submit("stays", [1] * length, max_tokens=1)
    sim.run()
    assert [rows for _, rows in _chunks(sim, "handed over")] == chunks
    stays = [rows for _, rows in _chunks(sim, "stays")]
    assert max(stays) <= CONFIG.chunk_tokens
    fixed = _sim(page_size=2, tail_tokens=2, deterministic=True)
    fixed.submit("fixed", [1] * length, kind=SeqKind.PREFILL_ONLY)
    fixed.run()
    assert {start % CONFIG.chunk_tokens for start, _ in _chunks(fixed, "fixed")} == {0}


def test_lower_priority_values_go_first() -> None:
    sim = _sim(max_num_seqs=1)
    sim.submit("normal", [1] * 4)
    sim.submit("urgent", [2] * 4, priority=-1)
    sim.step()
    assert _rows(sim.plans[0]) == [("urgent", 0, 4)]


def test_a_short_prompt_overtakes_a_long_one_that_came_before_it() -> None:
    sim = _sim(chunk_tokens=8, token_budget=8)
    sim.submit("long", [1] * 200, arrival=0.0)
    sim.step()
    sim.submit("short", [2] * 8, arrival=0.1)
    sim.step()
    assert _rows(sim.plans[0]) == [("long", 0, 8)]
    assert _rows(sim.plans[1]) == [("short", 0, 8)]
    sim.run()
    assert set(sim.over) == {"long", "short"}


def test_rows_that_are_cached_do_not_put_a_turn_off() -> None:
    sim = _sim(chunk_tokens=8, token_budget=8, prefix_caching=True)
    sim.submit("before", [1] * 200, arrival=0.0, max_tokens=1)
    sim.run()
    sim.plans.clear()
    sim.submit("follow-up", [1] * 200 + [2] * 4, arrival=1.0, max_tokens=1)
    sim.submit("short", [3] * 8, arrival=1.01, max_tokens=1)
    sim.run()
    first, second = map(_rows, sim.plans[:2])
    assert first == [("follow-up", 200, 4), ("short", 0, 4)]
    assert second == [("short", 4, 4)]


def test_a_long_prompt_is_overtaken_for_a_bounded_time_only() -> None:
    sim = _sim(chunk_tokens=8, token_budget=8)
    sim.submit("long", [1] * 200, arrival=0.0)
    for index in range(40):  # a short prompt for every step, for ever
        sim.submit(f"short{index}", [2] * 8, arrival=0.02 * index, max_tokens=1)
        sim.step()
    served = [rows[0][0] for rows in map(_rows, sim.plans)]
    patience = PATIENCE_S * (200 - 8)
    early = sum(0.02 * index < patience for index in range(40))
    assert served[:early] == [f"short{index}" for index in range(early)]
    assert served[early:] == ["long"] * (40 - early) or served[early : early + 25] == ["long"] * 25


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_gets_on_however_many_decode(deterministic: bool) -> None:
    sim = _sim(token_budget=2, deterministic=deterministic)
    for index in range(6):
        sim.hand_over(f"d{index}", [index] * 5, max_tokens=40)
    sim.submit("prompt", [9] * 30, max_tokens=1)
    for _ in range(12):
        sim.step()
    assert "prompt" in sim.over


requests = st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 8))


@given(
    length=st.integers(1, 40),
    neighbours=st.lists(requests, max_size=6),
    chunk=st.sampled_from([3, 8, 16]),
    budget=st.integers(1, 40),
)
@settings(deadline=None, max_examples=50)
def test_deterministic_chunks_do_not_depend_on_neighbours(
    length: int, neighbours: list[tuple[int, int, int]], chunk: int, budget: int
) -> None:
    alone, crowd = (
        _sim(deterministic=True, chunk_tokens=chunk, token_budget=budget, num_pages=400) for _ in range(2)
    )
    prompt = list(range(length))
    alone.submit("me", prompt, max_tokens=3)
    alone.run()
    waits = sorted(neighbours, key=lambda each: each[2])
    for index, (tokens, max_tokens, wait) in enumerate(waits):
        for _ in range(wait // 3):
            crowd.step()
        if wait % 2:
            crowd.hand_over(f"n{index}", [index] * tokens, max_tokens=max_tokens + 1)
        else:
            crowd.submit(f"n{index}", [index] * tokens, max_tokens=max_tokens)
        if index == len(waits) // 2:
            crowd.submit("me", prompt, max_tokens=3)
    if not crowd.sched.has("me") and "me" not in crowd.over:
        crowd.submit("me", prompt, max_tokens=3)
    crowd.run()
    assert _chunks(crowd, "me") == _chunks(alone, "me")
    prefill = [(start, rows) for start, rows in _chunks(alone, "me") if start < length]
    ends = [start + rows for start, rows in prefill]
    assert ends == [*range(chunk, length, chunk), length]
    assert crowd.tokens["me"] == alone.tokens["me"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_oldest_is_in_every_step_on_a_pool_for_one(deterministic: bool) -> None:
    sim = _sim(num_pages=8, deterministic=deterministic, prefix_caching=True)
    for index in range(8):
        sim.submit(f"s{index}", [index] * 9, max_tokens=20)
    while sim.begin() is not None:
        plan = sim.in_flight
        assert plan is not None
        oldest = min(
            (name for name in sim.specs if sim.sched.has(name)), key=lambda name: sim.specs[name].arrival
        )
        assert oldest in {step.seq_id for step in plan.seqs}
        sim.end()
    assert set(sim.over) == set(sim.specs)
    ends = [event.seq_id for event in sim.log if type(event).__name__ == "SeqFinished"]
    assert ends == sorted(ends)


def test_a_sequence_that_was_sent_back_is_not_starved_by_endless_handovers() -> None:
    sim = _sim(num_pages=12)
    sim.submit("first", [1] * 12, max_tokens=24)
    sim.submit("victim", [2] * 12, max_tokens=24)
    for index in range(200):
        for more in "abcdef":
            if not sim.hand_over(f"h{index}{more}", [3] * 6, max_tokens=6, growth=1):
                break
        sim.step()
        if "victim" in sim.over:
            break
    assert Preempted(seq_id="victim") in sim.log
    assert "victim" in sim.over
    sim.run()


def test_prompts_wait_in_line_while_handed_over_sequences_pass_them() -> None:
    sim = _sim(num_pages=10)
    sim.submit("big", [1] * 24, max_tokens=4, kind=SeqKind.PREFILL_ONLY)
    sim.step()
    sim.submit("blocked", [2] * 20, max_tokens=4)
    sim.submit("small", [3] * 4, max_tokens=4)
    assert sim.hand_over("handed", [4] * 6, max_tokens=2)
    sim.step()
    names = {name for name, _, _ in _rows(sim.plans[1])}
    assert names == {"big", "handed"}
    sim.run()
    assert set(sim.over) == set(sim.specs)
