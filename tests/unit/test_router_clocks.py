"""Clock offsets from heartbeats' round trips: delays that differ, clocks hours apart, clocks that drift."""

from __future__ import annotations

import random

import pytest

from pdserve.types import ClockSample
from router.clocks import ClockFilter

BEAT_S = 0.5


class Clocks:
    """A worker's clock beside the router's, and round trips between them."""

    def __init__(self, offset_s: float, rate: float, seed: int = 1) -> None:
        """offset_s: the router's clock less the worker's at 0. rate: by what share the worker's is fast."""
        self.offset_s, self.rate = offset_s, rate
        self.rng = random.Random(seed)

    def worker(self, at: float) -> float:
        return at * (1 + self.rate) - self.offset_s

    def truth(self, at: float) -> float:
        return at - self.worker(at)

    def trip(self, at: float, there: float, back: float, work: float = 0.0002) -> ClockSample:
        """A round trip that begins at the router's time `at`."""
        received, replied = at + there, at + there + work
        return ClockSample(
            sent_s=self.worker(at), received_s=received, replied_s=replied,
            answered_s=self.worker(replied + back),
        )  # fmt: skip

    def noisy(self, at: float) -> ClockSample:
        return self.trip(at, self.rng.expovariate(300), self.rng.expovariate(300))


def test_little_is_known_before_the_first_round_trip() -> None:
    estimate = ClockFilter(3600.0).estimate("w", 1.0)
    assert estimate.offset_s == 3600.0
    assert estimate.uncertainty_s == 1.0


@pytest.mark.parametrize("offset_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("rate", [0.0, 200e-6, -200e-6])
def test_the_truth_lies_within_the_uncertainty_at_any_time(offset_s: float, rate: float) -> None:
    clocks, found = Clocks(offset_s, rate), ClockFilter()
    widths = []
    for beat in range(400):
        at = beat * BEAT_S
        found.add(clocks.noisy(at))
        for later in (0.1, BEAT_S):
            estimate = found.estimate("w", at + later)
            assert abs(estimate.offset_s - clocks.truth(at + later)) <= estimate.uncertainty_s + 1e-9
            widths.append(estimate.uncertainty_s)
    assert sorted(widths)[len(widths) // 2] < 0.002


def test_a_short_round_trip_beats_long_ones() -> None:
    clocks, found = Clocks(5.0, 0.0), ClockFilter()
    for number, delay in enumerate((0.08, 0.0004, 0.08, 0.08)):
        found.add(clocks.trip(number * BEAT_S, delay, 0.0003))
    estimate = found.estimate("w", 2.0)
    assert abs(estimate.offset_s - 5.0) < 0.0002
    assert estimate.uncertainty_s < 0.0015


def test_an_old_estimate_is_trusted_less_and_replaced() -> None:
    clocks, found = Clocks(0.0, 200e-6), ClockFilter()
    found.add(clocks.trip(0.0, 0.0001, 0.0001))
    fresh, old = found.estimate("w", 0.0), found.estimate("w", 60.0)
    assert old.uncertainty_s > fresh.uncertainty_s + 0.01
    found.add(clocks.trip(60.0, 0.003, 0.003))
    newer = found.estimate("w", 60.0)
    assert abs(newer.offset_s - clocks.truth(60.0)) < 0.001


def test_a_trip_that_took_less_than_no_time_is_none() -> None:
    found = ClockFilter()
    found.add(ClockSample(sent_s=1.0, received_s=5.0, replied_s=6.0, answered_s=1.5))
    found.add(ClockSample(sent_s=1.0, received_s=6.0, replied_s=5.0, answered_s=9.0))
    assert found.estimate("w", 5.0) == ClockFilter().estimate("w", 5.0)
