"""The arithmetic of the benchmark: values from token times, pairing, best peers, percentiles."""

from __future__ import annotations

import pytest

from benchmarks.cases import CASES, DECODE, PREFILL, THROUGHPUT, Case, Prompts
from benchmarks.report import Line, latency, paired_ratio, percentile, too_slow, value_of


def case(metric: str, *, prompt: int = 100, output: int = 3, concurrency: int = 1) -> Case:
    return Case(
        name="c",
        metric=metric,
        unit="tokens/s",
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=concurrency,
    )


def line(ours: list[float], values: dict[str, list[float]]) -> Line:
    family = {name: name.split()[0] for name in values}
    return Line(case=case(DECODE), ours=ours, ours_aggregated=ours, values=values, family=family)


def test_each_metric_counts_what_it_says() -> None:
    assert value_of(case(PREFILL, output=1), [[[0.5]], [[0.25]], [[0.2]]]) == 400.0
    assert value_of(case(DECODE), [[[1.0, 1.1, 1.2]]]) == pytest.approx(10.0)
    assert value_of(case(THROUGHPUT, concurrency=2), [[[0.1, 0.2, 0.3], [0.1, 0.4, 0.5]]]) == 12.0


@pytest.mark.parametrize("times", [[[0.1, 0.2]], [], [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]]])
def test_a_run_with_missing_or_extra_tokens_has_no_value(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="every token"):
        value_of(case(DECODE), [times])


def test_a_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians() -> None:
    # The machine slowed down for both in the last two pairs: the ratio within a pair does not move.
    assert paired_ratio([200, 200, 200, 90, 100], [100, 100, 100, 45, 50]) == 2.0
    assert paired_ratio([10, 20, 90], [10, 40, 30]) == 1.0
    assert paired_ratio([], []) is None


def test_a_peer_is_measured_by_its_best_variant_and_we_by_the_best_peer() -> None:
    found = line([100.0] * 3, {"a slow": [10.0] * 3, "a fast": [50.0] * 3, "b": [80.0] * 3}).as_json(
        ["a", "b", "c"]
    )
    assert found["peers"] == {"a": 50.0, "b": 80.0, "c": None}
    assert found["peer_variant"] == {"a": "a fast", "b": "b"}
    assert found["ratio_to_best"] == 1.25
    assert found["ratio_to_own_aggregated"] == 1.0


def test_only_variants_far_behind_their_own_engine_are_left_out() -> None:
    warm_up = {"ours": 1.0, "a x": 79.0, "a y": 100.0, "a z": 81.0, "b x": 5.0}
    family = {"a x": "a", "a y": "a", "a z": "a", "b x": "b"}
    assert too_slow(warm_up, family) == {"a x"}
    assert too_slow({}, {}) == set()


def test_lines_without_peers_or_without_ours_have_no_ratio() -> None:
    assert line([100.0], {"a x": []}).as_json(["a"])["ratio_to_best"] is None
    assert line([], {"a x": [1.0]}).as_json(["a"])["ratio_to_best"] is None


def test_percentiles_are_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_latency_takes_gaps_within_a_request_only() -> None:
    found = latency([[[0.1, 0.2, 0.2], [1.0, 1.5, 1.6]]])
    assert found["ttft_p50_ms"] == 100.0
    assert found["itl_p99_ms"] == 500.0
    assert latency([])["itl_p50_ms"] is None


def test_prompts_are_unique_and_as_long_as_asked() -> None:
    prompts = Prompts(seed=1)
    taken = [tuple(p) for one in CASES for p in prompts.take(one) + prompts.take(one)]
    assert len({p[:16] for p in taken}) == len(taken)
    assert {len(p) for p in taken} == {one.prompt_tokens for one in CASES}
