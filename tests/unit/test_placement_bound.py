"""The lower bound against the best of all placements, found by trying every one of them on small cases."""

from __future__ import annotations

from itertools import chain, combinations, combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.parallel.placement import GOOD, Policy, plan
from pdserve.parallel.placement_bound import lower_bound, node_bound
from pdserve.parallel.placement_table import Topology

Case = tuple[tuple[float, ...], int, int]
"""Loads, ranks, slots per rank."""


def best_of_all(loads: tuple[float, ...], num_ranks: int, slots: int) -> float:
    """The least largest load over every choice of homes, with the best shares for each.

    For given homes it is the largest, over sets of experts, of their load over the number of ranks that hold
    any of them (the max-flow min-cut theorem): no share can bring the set's load anywhere else.
    """
    experts = range(len(loads))
    sets = [
        set(chosen)
        for chosen in chain.from_iterable(combinations(experts, n) for n in range(1, len(loads) + 1))
    ]
    weights = [sum(loads[e] for e in chosen) for chosen in sets]
    best = sum(loads)
    held_by_one = [set(held) for held in combinations(experts, min(slots, len(loads)))]
    for held in combinations_with_replacement(held_by_one, num_ranks):
        if len(set().union(*held)) == len(loads):
            found = max(
                w / sum(not c.isdisjoint(h) for h in held) for c, w in zip(sets, weights, strict=True)
            )
            best = min(best, found)
    return best


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 6 if num_ranks < 3 else 5))
    slots = draw(st.integers(-(-num_experts // num_ranks), num_experts))
    loads = draw(st.lists(st.integers(0, 40), min_size=num_experts, max_size=num_experts))
    return tuple(map(float, loads)), num_ranks, slots


@settings(max_examples=200, deadline=None, derandomize=True)  # nearness is a finding, not a theorem
@given(cases())
def test_no_placement_beats_the_bound_and_the_plan_is_near_the_best(case: Case) -> None:
    loads, num_ranks, slots = case
    best = best_of_all(*case)
    bound = lower_bound(loads, num_ranks, slots).value
    found = plan([loads], Topology(num_nodes=1, ranks_per_node=num_ranks), slots).layers[0]
    assert bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.largest
    assert found.largest <= best * 1.15 + 1e-9
    assert found.ratio <= GOOD or found.reason


@pytest.mark.parametrize(
    ("loads", "num_ranks", "slots", "kind"),
    [
        ((1.0, 1.0, 1.0, 1.0), 2, 2, "mean load"),
        ((8.0, 1.0, 1.0), 3, 1, "copies"),
        ((3.0, 3.0, 3.0, 1.0), 2, 2, "share a rank"),
        ((9.0, 1.0, 1.0, 1.0), 2, 2, "beside"),
    ],
)
def test_each_argument_is_the_strongest_somewhere_and_exact_there(
    loads: tuple[float, ...], num_ranks: int, slots: int, kind: str
) -> None:
    bound = lower_bound(loads, num_ranks, slots)
    assert bound.value == pytest.approx(best_of_all(loads, num_ranks, slots))
    assert kind in bound.kind


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(1, 2))
def test_no_choice_of_nodes_beats_the_bound_by_node(loads: list[int], size: int) -> None:
    groups = [float(sum(loads[first : first + size])) for first in range(0, 4, size)]
    best = min(
        max(sum(groups[g] for g in chosen), sum(groups) - sum(groups[g] for g in chosen)) / 2
        for chosen in combinations(range(len(groups)), len(groups) // 2)
    )  # two nodes of two ranks: at best a node's load is level within it
    topology = Topology(num_nodes=2, ranks_per_node=2)
    policy = Policy(by_node=True, num_groups=len(groups))
    found = plan([list(map(float, loads))], topology, 2, policy=policy).layers[0]
    assert node_bound(groups, list(map(float, loads)), 2, 2).value <= best + 1e-9
    assert found.bound.value - 1e-9 <= found.largest
