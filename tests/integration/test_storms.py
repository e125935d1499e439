"""Disconnect storms: two hundred streams gone within a second, in each phase, on real processes.

The model is a tiny one: what is tested is who lets go of what, and when, not how fast it computes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.storm import LEASE_S, PHASES, Report, StormFleet, back_at, make_model


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StormFleet]:
    made = StormFleet.start(make_model(tmp_path_factory.mktemp("tiny")))
    yield made
    made.stop()


def check(fleet: StormFleet, report: Report) -> None:
    print(report)
    assert report.cancelling_ms < 1000
    assert report.steps_after == (0, 0), "once every key is closing no step starts"
    assert report.idle_ms < 1e3 * LEASE_S
    assert back_at(report.before_ms, report.after_ms)
    assert report.same_processes
    assert max(report.tombstones) <= fleet.seed, "one answer for each request at most"


@pytest.mark.parametrize("vanish", [False, True], ids=["cancel", "vanish"])
@pytest.mark.parametrize("phase", PHASES)
async def test_storm(fleet: StormFleet, phase: str, vanish: bool) -> None:
    check(fleet, await fleet.round(PHASES[phase], vanish=vanish))


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
async def test_twenty_storms(fleet: StormFleet, phase: str) -> None:
    for n in range(20):
        check(fleet, await fleet.round(PHASES[phase], vanish=n % 2 == 1))
