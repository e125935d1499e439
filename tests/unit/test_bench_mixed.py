"""The arithmetic of the mixed load: arrivals, limits, goodput, where to measure next, crossovers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mixed_load import (
    CHAT,
    CHATS_PER_LONG,
    LONG,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Arrival,
    crossovers,
    equal_load,
    good_rate,
    goodput,
    next_rate,
    prompts,
    schedule,
    seen,
    summary,
)

LADDER = (1.0, 2.0, 4.0, 8.0)


def tokens(first: float, gap: float, count: int = OUTPUT_TOKENS) -> list[float]:
    return [first + gap * n for n in range(count)]


def run(share: float, **more: Any) -> dict[str, Any]:
    return {"share": share, "sustained": True, "unfinished": 0, "itl_chat_p99_ms": 50.0, **more}


@given(st.floats(0.2, 8), st.floats(2, 60), st.integers(0, 1000))
def test_arrivals_have_the_rate_and_the_mix_asked_for(rate: float, seconds: float, seed: int) -> None:
    found = schedule(rate, seconds, seed)
    assert len(found) == max(1, round(rate * seconds))
    times = [a.at_s for a in found]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= seconds
    longs = [n for n, a in enumerate(found) if a.kind == LONG]
    assert abs(len(longs) - len(found) / (CHATS_PER_LONG + 1)) <= 1
    assert found == schedule(rate, seconds, seed)


def test_arrivals_are_bunched_as_poisson_ones_and_not_evenly_spaced() -> None:
    times = [a.at_s for a in schedule(20, 500, seed=1)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.05, rel=0.01)
    assert spread / mean == pytest.approx(1.0, abs=0.05)  # 1 for exponential gaps, 0 for even ones


def test_prompts_are_as_long_as_their_kind_and_unlike_each_other() -> None:
    arrivals = [Arrival(at_s=0, kind=CHAT), Arrival(at_s=1, kind=LONG), Arrival(at_s=2, kind=CHAT)]
    first, long, second = prompts(arrivals, seed=3)
    assert [len(first), len(long)] == [PROMPT_TOKENS[CHAT], PROMPT_TOKENS[LONG]]
    assert first != second
    assert first != prompts(arrivals, seed=4)[0]


@pytest.mark.parametrize(
    ("kind", "times", "met"),
    [
        (CHAT, tokens(11.9, 0.05), True),
        (CHAT, tokens(12.1, 0.05), False),
        (LONG, tokens(19.9, 0.05), True),
        (LONG, tokens(20.1, 0.05), False),
        (CHAT, tokens(11.0, 0.11), False),
        (CHAT, tokens(11.0, 0.05, OUTPUT_TOKENS - 1), False),
        (CHAT, [], False),
    ],
)
def test_a_request_meets_all_of_its_limits_or_none(kind: str, times: list[float], met: bool) -> None:
    assert seen(Arrival(at_s=10.0, kind=kind), times).met is met


def test_one_gap_of_63_over_the_limit_is_a_miss() -> None:
    times = tokens(1.0, 0.02)
    late = times[:30] + [at + 0.1 for at in times[30:]]
    assert seen(Arrival(at_s=0.0, kind=CHAT), times).met
    assert not seen(Arrival(at_s=0.0, kind=CHAT), late).met


def test_a_summary_counts_from_the_arrival_and_tells_what_was_missed() -> None:
    arrivals = [Arrival(at_s=float(n), kind=LONG if n == 1 else CHAT) for n in range(5)]
    times = [tokens(0.5, 0.02), tokens(2.0, 0.2), tokens(5.0, 0.02), tokens(3.4, 0.03), []]
    found = summary(arrivals, times)
    assert (found["requests"], found["long"], found["unfinished"], found["met"]) == (5, 1, 1, 2)
    assert found["missed"] == {"ttft_short": 2, "ttft_long": 0, "itl": 1}
    assert found["goodput_per_s"] == pytest.approx(2 / 4)
    assert found["ttft_long_p50_ms"] == 1000.0
    assert found["ttft_chat_p99_ms"] == 3000.0
    assert found["itl_chat_p99_ms"] == 30.0
    assert not found["sustained"]
    # Three chats whole; of the long one those that came until 7 s, 3 s after the last arrival.
    assert found["output_tokens_per_s"] == pytest.approx((3 * 64 + 26) / 7, abs=0.1)


def test_the_good_rate_is_the_highest_one_with_enough_met() -> None:
    assert good_rate({1.0: run(1.0), 2.0: run(0.9), 4.0: run(0.89)}) == 2.0
    assert good_rate({1.0: run(0.5)}) == 0.0


def test_measuring_goes_one_rung_beyond_the_first_miss_and_then_between() -> None:
    shares = {1.0: 1.0, 2.0: 0.95, 4.0: 0.5, 8.0: 0.1, 3.0: 0.92, 3.5: 0.7}
    curve: dict[float, dict[str, Any]] = {}
    asked = []
    while (rate := next_rate(curve, LADDER, halvings=2)) is not None:
        asked.append(rate)
        curve[rate] = run(shares[rate])
    assert asked == [1.0, 2.0, 4.0, 8.0, 3.0, 3.5]
    assert good_rate(curve) == 3.0


def test_measuring_stops_climbing_where_requests_were_left_unfinished() -> None:
    curve = {1.0: run(1.0), 2.0: run(0.2, unfinished=5)}
    assert next_rate(curve, LADDER, halvings=0) is None
    assert next_rate(curve, LADDER, halvings=1) == 1.5


def test_measuring_ends_at_half_of_the_lowest_rung() -> None:
    curve = {1.0: run(0.5), 2.0: run(0.1)}
    assert next_rate(curve, LADDER, halvings=2) == 0.5
    assert next_rate({**curve, 0.5: run(0.2)}, LADDER, halvings=2) is None
    assert next_rate({**curve, 0.5: run(1.0)}, LADDER, halvings=2) == 0.75


def test_a_system_that_never_misses_is_measured_up_to_the_ladders_end() -> None:
    assert next_rate({rate: run(1.0) for rate in LADDER}, LADDER, halvings=2) is None


def test_latency_is_compared_at_rates_that_both_sustain() -> None:
    curves = {
        "ours": {1.0: run(1, itl_chat_p99_ms=30.0), 2.0: run(1, itl_chat_p99_ms=45.0), 4.0: run(1)},
        "a": {
            1.0: run(1, itl_chat_p99_ms=60.0),
            2.0: run(1, itl_chat_p99_ms=90.0),
            4.0: run(0, sustained=False),
        },
        "b": {1.0: run(1, itl_chat_p99_ms=40.0), 2.0: run(1, sustained=False, itl_chat_p99_ms=10.0)},
    }
    found = equal_load(curves, "ours", ["a", "b", "missing"])
    assert found is not None
    assert (found["rate"], found["peer"], found["ratio"]) == (2.0, "a", 0.5)
    assert [one["peer"] for one in found["all"]] == ["b", "a"]
    assert equal_load(curves, "ours", []) is None
    assert equal_load({}, "ours", ["a"]) is None


def test_goodput_is_over_the_best_peers() -> None:
    curves = {"ours": {3.0: run(0.95)}, "a": {1.0: run(1.0)}, "b": {2.0: run(0.9)}}
    assert goodput(curves, "ours", ["a", "b"]) == {
        "rates": {"ours": 3.0, "a": 1.0, "b": 2.0},
        "peer": "b",
        "ratio": 1.5,
        "ratio_above": None,
    }
    nothing = goodput({"ours": {3.0: run(0.95)}, "a": {1.0: run(0.1), 0.5: run(0.2)}}, "ours", ["a"])
    assert (nothing["ratio"], nothing["ratio_above"]) == (None, 6.0)
    assert goodput({"ours": {3.0: run(0.95)}}, "ours", ["a"])["ratio_above"] is None


def test_crossovers_lie_where_the_lead_changes() -> None:
    a = {1.0: {"x": 10.0}, 2.0: {"x": 20.0}, 4.0: {"x": 30.0}, 8.0: {"x": None}}
    b = {1.0: {"x": 20.0}, 2.0: {"x": 30.0}, 4.0: {"x": 20.0}, 8.0: {"x": 1.0}}
    assert crossovers(a, b, "x") == [3.0]
    assert crossovers(a, a, "x") == []
    assert crossovers(a, {1.0: {"x": 0.0}}, "x") == []
