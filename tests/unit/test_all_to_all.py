"""All-to-all between real processes: every row arrives once, in order, whatever the counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.rank_kit import run_ranks


@pytest.fixture(scope="module", params=[("gloo", 3), ("shm", 4)], ids=lambda param: param[0])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    exchange, size = request.param
    folder = tmp_path_factory.mktemp("group")
    case = "tests.support.exchange_cases:all_to_all"
    return run_ranks(size, case, folder, exchange=exchange, rounds=120)


def test_rows_arrive_in_order_of_sender(answers: list[Any]) -> None:
    """Also in pieces of a tiny slot; bytes counted are those that left."""
    assert [answer["rows"] for answer in answers] == [[[], 0]] * len(answers)


def test_experts_over_ranks_have_the_bits_of_one_device(answers: list[Any]) -> None:
    """Sent to all, sent to the tokens' ranks, and with tokens on their own ranks alone."""
    assert [answer["experts"] for answer in answers] == [[]] * len(answers)
