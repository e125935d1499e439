"""No placement can do better than this: lower bounds of the largest rank load of one layer. Pure.

What lives here: bounds that hold for every choice of homes, replicas and shares, also for unequal shares, so
that a planner's distance from the best possible is known without searching for it. What does not: finding a
placement (`placement_pack`). Loads are in any unit (tokens of a window); the bounds are in the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """value: the largest rank load is at least this. kind: the argument that says so, in a few words."""

    value: float
    kind: str


def lower_bound(loads: Sequence[float], num_ranks: int, slots_per_rank: int) -> Bound:
    """The strongest of four. There are at least as many slots as experts."""
    extra = num_ranks * slots_per_rank - len(loads)
    falling = sorted(loads, reverse=True)
    bounds = (
        Bound(value=sum(loads) / num_ranks, kind="mean load of a rank"),
        Bound(
            value=_copies(falling, num_ranks, extra), kind="hottest expert over the copies there is room for"
        ),
        Bound(value=_whole(falling, num_ranks, extra), kind="hot experts that have to share a rank"),
        Bound(
            value=_beside(falling, num_ranks, slots_per_rank),
            kind="hottest expert beside those that need its rank",
        ),
    )
    return max(bounds, key=lambda bound: bound.value)


def node_bound(
    groups: Sequence[float], experts: Sequence[float], num_nodes: int, ranks_per_node: int
) -> Bound:
    """Where groups of experts stay on one node each: a group is never split, an expert over one node's ranks
    only.

    groups: load of each group. experts: load of each expert. At least one group a node.
    """
    falling = sorted(groups, reverse=True)
    bounds = (
        Bound(value=falling[0] / ranks_per_node, kind="hottest group of experts over the ranks of its node"),
        Bound(value=max(experts) / ranks_per_node, kind="hottest expert over the ranks of its node"),
        Bound(
            value=_whole(falling, num_nodes, 0) / ranks_per_node,
            kind="hot groups that have to share a node",
        ),
    )
    return max(bounds, key=lambda bound: bound.value)


def copies_by_load(loads: Sequence[float], num_ranks: int, extra: int) -> list[int]:
    """How many copies of each expert make the largest load of a copy least, with `extra` copies beyond one
    each.

    Giving the next copy to the expert with the largest load per copy is optimal: the result's largest load
    per copy can only be beaten by more copies of that very expert. At most one copy a rank.
    """
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(extra):
        expert = heap[0][1]
        if counts[expert] == num_ranks:
            break
        counts[expert] += 1
        heapreplace(heap, (-loads[expert] / counts[expert], expert))
    return counts


def _copies(falling: Sequence[float], num_ranks: int, extra: int) -> float:
    """A copy's share lies on one rank, and there are only so many copies to give."""
    counts = copies_by_load(falling, num_ranks, extra)
    return max(load / count for load, count in zip(falling, counts, strict=True))


def _whole(falling: Sequence[float], num_ranks: int, extra: int) -> float:
    """At most `extra` experts are split. Of the k * ranks + 1 + extra hottest, so many are whole that k + 1
    of them share a rank (pigeonhole); those weigh at least as much as the coldest k + 1 among the hottest.
    """
    sums = [0.0, *accumulate(falling)]
    best = 0.0
    for k in range(1, (len(falling) - 1 - extra) // num_ranks + 1):
        end = k * num_ranks + 1 + extra
        best = max(best, sums[end] - sums[end - k - 1])
    return best


def _beside(falling: Sequence[float], num_ranks: int, slots: int) -> float:
    """With c copies, some rank serves a c-th of the hottest expert at least, and the slots elsewhere, less
    the other copies, do not hold all the others: the coldest of them are at that rank whole.
    """
    extra = num_ranks * slots - len(falling)
    cold = [0.0, *accumulate(reversed(falling[1:]))]
    return min(
        falling[0] / c + cold[min(max(0, slots - extra + c - 2), len(falling) - 1)]
        for c in range(1, min(extra + 1, num_ranks) + 1)
    )
