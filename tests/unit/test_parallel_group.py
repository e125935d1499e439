"""Groups of real processes: sums and gathers, where they listen, and what a rank that is gone looks like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.parallel.group import GroupConfig, open_group
from tests.support.rank_kit import run_ranks

LOOPBACK = "0100007F"
CASES = "tests.support.rank_cases"


EXCHANGES = ("gloo", "shm")


@pytest.fixture(scope="module", params=EXCHANGES)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("group")
    return run_ranks(3, f"{CASES}:collectives", folder, exchange=request.param)


def test_every_rank_gets_the_sum(answers: list[Any]) -> None:
    assert all(answer["sum"] == [6.0] * 15 for answer in answers)
    assert all(answer["integers"] == [-2147483648] * 7 for answer in answers)


def test_gathers_keep_the_order_of_ranks(answers: list[Any]) -> None:
    want = [[[float(rank)] * 3] * 2 for rank in range(3)]
    assert all(answer["parts"] == want for answer in answers)
    assert [answer["first"] for answer in answers] == [want, None, None]


def test_traffic_counts_what_was_sent(answers: list[Any]) -> None:
    assert all((answer["calls"], answer["bytes"]) == (4, 60 + 28 + 12 + 12) for answer in answers)


def test_a_group_listens_on_loopback_or_nowhere(answers: list[Any]) -> None:
    assert all(set(answer["listening"]) <= {LOOPBACK} for answer in answers)


def test_many_turns_in_pieces_never_mix(tmp_path: Path) -> None:
    """Tensors shorter and longer than a slot; a rank that only gives may run ahead of the one that reads."""
    assert run_ranks(3, f"{CASES}:many_turns", tmp_path, turns=900) == [True] * 3


def test_a_rank_that_ends_is_a_typed_error_for_the_others(tmp_path: Path) -> None:
    gone = "a rank of this replica is gone; it starts again"
    assert run_ranks(2, f"{CASES}:one_leaves", tmp_path) == [[gone, gone], None]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_silent_rank_is_a_typed_error_after_the_limit(tmp_path: Path, exchange: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    late = "a rank of this replica did not answer in time; it starts again"
    assert run_ranks(2, f"{CASES}:one_is_silent", tmp_path, exchange=exchange) == [late, None]


def test_a_rank_that_never_comes_is_a_typed_error(tmp_path: Path) -> None:
    told = run_ranks(1, f"{CASES}:nobody_comes", tmp_path)
    assert told == ["the ranks of this replica did not meet in time; it starts again"]


def test_a_backend_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = {"rank": 0, "size": 1, "meeting": tmp_path / "meet"}
    with pytest.raises(ConfigError, match="'carrier-pigeon' is not known"):
        open_group(GroupConfig(**config, backend="carrier-pigeon"))  # type: ignore[arg-type]
