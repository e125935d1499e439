"""The check can fail: every planted defect is caught within 1,000 seeds, by the rule that should catch it.

What the defects are: `defects`. How they are planted and hunted: `planted`. Runs are in processes of
their own, two at a time, and the table of who caught what, and where, is printed.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.simulation.defects import DEFECTS
from tests.simulation.planted import Catch, control, hunt

NUM_SEEDS = 1000
NUM_CONTROL = 3


def _hunt(number: int) -> Catch:
    return hunt(DEFECTS[number], range(NUM_SEEDS))


def _control(number: int) -> Catch:
    return control(DEFECTS[number], range(NUM_CONTROL))


def _all(what: str) -> list[Catch]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_hunt if what == "hunt" else _control, range(len(DEFECTS))))


@pytest.mark.timeout(900)
def test_every_planted_defect_is_caught_by_the_rule_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    catches = _all("hunt")
    with capfd.disabled():
        print()
        for catch in catches:
            print(f"  {catch.defect:52} seed {catch.seed!s:>4}  {catch.rule}")
    missed = [catch.defect for catch in catches if catch.seed is None]
    assert not missed
    for defect, catch in zip(DEFECTS, catches, strict=True):
        assert catch.rule in defect.rules, catch


@pytest.mark.timeout(900)
def test_without_the_defect_the_same_runs_break_nothing() -> None:
    """Neither the bias nor the layer that is off is what is caught."""
    assert [catch for catch in _all("control") if catch.seed is not None] == []


def test_there_are_as_many_as_the_protocol_asks_for() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(set(names)) == len(names) >= 22
