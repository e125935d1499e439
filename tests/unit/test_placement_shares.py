"""Shares of Ray's custom resource: a worker of several ranks fits where one of one rank does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.fleet.placement import rank_share
from pdserve.fleet.spec import RESOURCE_SHARE


@given(st.integers(1, 64))
def test_ranks_of_a_worker_that_wants_a_node_fit_one(num_ranks: int) -> None:
    share = rank_share(1.0, num_ranks)
    assert 0.9 < share * num_ranks <= 1.0
    assert abs(share * 10_000 - round(share * 10_000)) < 1e-6


@given(st.integers(1, 64))
def test_a_small_share_does_not_vanish(num_ranks: int) -> None:
    assert rank_share(RESOURCE_SHARE, num_ranks) == RESOURCE_SHARE
