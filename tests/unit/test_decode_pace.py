"""How far apart decode steps are while prompts are computed beside them."""

from __future__ import annotations

import pytest

from decode_worker.pace import BURST, pace_s


def test_without_prompts_there_is_no_pace() -> None:
    assert pace_s(0.05, 0) == 0.0


def test_one_prompt_gets_the_pace_that_was_set_and_a_burst_at_most_twice_that() -> None:
    assert pace_s(0.05, 1) == 0.05
    assert pace_s(0.05, BURST + 1) == pytest.approx(0.1)
    assert pace_s(0.05, 10 * BURST) == pytest.approx(0.1)


def test_more_prompts_never_make_steps_more_frequent() -> None:
    paces = [pace_s(0.05, count) for count in range(1, 3 * BURST)]
    assert paces == sorted(paces)


def test_a_pace_of_zero_is_none_however_many_prompts_there_are() -> None:
    assert pace_s(0.0, 40) == 0.0
