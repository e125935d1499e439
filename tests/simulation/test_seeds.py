"""A thousand seeds of a fleet under faults: no invariant breaks, and every arrow and every fault is met.

What a seed is: `runner`. What must hold: `invariants`. A failing seed prints its trace and how to replay it.
"""

from __future__ import annotations

import pytest

from tests.simulation import coverage
from tests.simulation.run import Bar, run_many
from tests.simulation.runner import run_seed

NUM_SEEDS = 1000
NUM_FULL = 20_000


@pytest.mark.timeout(900)
def test_a_thousand_seeds_break_nothing_and_meet_everything(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        sums = run_many(0, NUM_SEEDS, workers=2, on_progress=Bar(NUM_SEEDS))
        if sums.failed_seed is None:
            print(coverage.table(sums.arrows, sums.faults))
    assert sums.failed_seed is None, sums.failure
    rare = coverage.missing(sums.arrows, sums.faults)
    assert not rare, f"fired fewer than {coverage.LEAST} times in {sums.runs} seeds: {rare}"


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_many_more_seeds_break_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        sums = run_many(NUM_SEEDS, NUM_FULL, workers=2, on_progress=Bar(NUM_FULL))
    assert sums.failed_seed is None, sums.failure


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_replays_exactly(seed: int) -> None:
    one, other = run_seed(seed, trace=True), run_seed(seed, trace=True)
    assert one.trace == other.trace
    assert one == other
