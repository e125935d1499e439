"""Rates and quantiles between two looks at a router, and the page that `pdserve top` draws from them."""

from __future__ import annotations

import bisect
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from pdserve.api import FleetStatus, SecondsHistogram, Traffic
from pdserve.cli.top import screen
from pdserve.obs.rates import BLOCKS, History, Rates, quantile, rates, sparkline
from router.metrics import RouterMetrics
from tests.support import message_values as some

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def histogram(values: list[float]) -> SecondsHistogram:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect.bisect_left(BOUNDS, value)] += 1
    return SecondsHistogram(bounds=BOUNDS, counts=tuple(counts), sum=sum(values))


def status(traffic: Traffic, router_id: str = "r") -> FleetStatus:
    return FleetStatus(
        router_id=router_id, workers=(), queued=0, running=0, uptime_s=1.0, draining=False,
        pairing_problems=(), traffic=traffic,
    )  # fmt: skip


def test_rates_are_of_the_time_between_the_looks() -> None:
    before = Traffic(prompt_tokens=100, completion_tokens=1000, finished_requests=5, ttft=histogram([0.5]))
    after = Traffic(
        prompt_tokens=300, cached_tokens=50, completion_tokens=1500, finished_requests=6, failed_requests=1,
        ttft=histogram([0.5, 0.005, 0.005]),
    )  # fmt: skip
    found = rates(before, after, 2.0)
    assert found.completion_tokens == 250
    assert found.prompt_tokens == 100
    assert found.cached_share == 0.25
    assert (found.requests, found.failures) == (0.5, 0.5)
    assert found.ttft_p99 is not None
    assert 0.001 < found.ttft_p99 <= 0.01
    assert found.itl_p50 is None


@given(st.lists(st.floats(0.0001, 0.9), min_size=1, max_size=40), st.floats(0.01, 1))
@example([0.002], 1.0)
@example([0.02], 1.0)
@example([0.2], 1.0)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    found = quantile(histogram(values), share)
    ordered = sorted(values)
    true = next(value for rank, value in enumerate(ordered, 1) if rank >= share * len(ordered))
    bucket = bisect.bisect_left(BOUNDS, true)
    assert found is not None
    assert (0.0, *BOUNDS)[bucket] <= found <= BOUNDS[bucket]


def test_values_above_all_bounds_count_as_the_highest() -> None:
    assert quantile(histogram([5.0, 6.0]), 0.5) == 1.0
    assert quantile(SecondsHistogram(), 0.5) is None


def test_a_router_that_was_started_again_has_no_rates_until_the_second_look() -> None:
    history = History()
    history.push(status(Traffic(completion_tokens=10)), 0.0)
    history.push(status(Traffic(completion_tokens=30)), 1.0)
    assert history.now.completion_tokens == 20
    history.push(status(Traffic(completion_tokens=4), "other"), 2.0)
    assert len(history.rates) == 1
    history.push(status(Traffic(completion_tokens=10), "other"), 4.0)
    assert history.of("completion_tokens") == [20, 3]


def test_sparklines_are_scaled_to_the_greatest_and_show_what_is_missing() -> None:
    assert sparkline([0.0, 1.0, 2.0], 8) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert sparkline([None, 0.0], 8) == "·" + BLOCKS[0]
    assert sparkline([1.0] * 100, 5) == BLOCKS[7] * 5


@given(some.statuses)
def test_every_status_can_be_drawn(found: FleetStatus) -> None:
    history = History()
    history.push(found, 0.0)
    console = Console(width=120)
    with console.capture() as drawn:
        console.print(screen(found, history))
    assert "pages by state" in drawn.get()


def test_the_router_tells_what_its_metrics_count() -> None:
    metrics = RouterMetrics()
    for outcome, amount in (("stop", 2), ("length", 1), ("cancelled", 3)):
        for _ in range(amount):
            metrics.outcome(outcome)
    metrics.tokens["prompt"].inc(7)
    metrics.sent.inc(5)
    for mode, value in (("local", 0.001), ("disaggregated", 0.3), ("aggregated", 1000.0)):
        metrics.ttft[mode].observe(value)
    traffic = metrics.traffic()
    assert (traffic.finished_requests, traffic.failed_requests) == (3, 3)
    assert (traffic.prompt_tokens, traffic.completion_tokens) == (7, 5)
    assert traffic.ttft.sum == pytest.approx(1000.301)
    assert sum(traffic.ttft.counts) == 3
    assert traffic.ttft.counts[-1] == 1
    assert all(low < high for low, high in itertools.pairwise(traffic.ttft.bounds))
    assert rates(Traffic(), traffic, 1.0) != Rates()
