"""The placement planner: what every table keeps to, how near it comes to the bound, and what it moves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.parallel.placement import GOOD, Policy, plan
from pdserve.parallel.placement_table import Home, Placement, Topology, contiguous, round_robin

ONE_NODE = Topology(num_nodes=1, ranks_per_node=4)


def zipf(num_experts: int, skew: float, seed: int = 0) -> list[float]:
    """Loads of a Zipf law, hot experts anywhere."""
    loads = [1e5 / (rank + 1) ** skew for rank in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], Topology, int, Policy]:
    topology = Topology(num_nodes=draw(st.integers(1, 3)), ranks_per_node=draw(st.integers(1, 4)))
    num_groups = topology.num_nodes * draw(st.integers(1, 3))
    num_experts = num_groups * draw(st.integers(1, 4))
    policy = Policy(
        by_node=draw(st.booleans()),
        num_groups=draw(st.sampled_from([0, num_groups])),
        even_shares=draw(st.booleans()),
    )
    least = -(-num_experts // topology.num_nodes // topology.ranks_per_node)
    slots = least + num_experts // num_groups + draw(st.integers(0, 2))
    load = st.floats(0, 1e6, allow_nan=False, allow_subnormal=False)
    layer = st.lists(load, min_size=num_experts, max_size=num_experts)
    return draw(st.lists(layer, min_size=1, max_size=2)), topology, slots, policy


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_table_keeps_to_the_rules(problem: tuple[list[list[float]], Topology, int, Policy]) -> None:
    loads, topology, slots, policy = problem
    found = plan(loads, topology, slots, policy=policy)
    table = found.table  # homes, distinct ranks, slots and shares are checked when it is made
    assert plan(loads, topology, slots, policy=policy) == found
    for number, (layer, result) in enumerate(zip(loads, found.layers, strict=True)):
        occupants = [e for e in table.occupants(number) if e is not None]
        assert len(occupants) == sum(len(homes) for homes in table.layers[number])
        assert sum(table.rank_loads(number, layer)) == pytest.approx(sum(layer))
        assert table.largest(number, layer) == pytest.approx(result.largest)
        assert result.largest >= result.bound.value * (1 - 1e-9)
        assert result.ratio <= GOOD or result.reason
        for homes in table.layers[number]:
            nodes = {topology.node_of(home.rank) for home in homes}
            assert len(nodes) == 1 or not policy.by_node
            assert not policy.even_shares or len({home.share for home in homes}) == 1


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 9))
def test_a_table_is_kept_where_it_still_fits_and_never_made_worse(
    problem: tuple[list[list[float]], Topology, int, Policy], seed: int
) -> None:
    loads, topology, slots, policy = problem
    before = plan(loads, topology, slots, policy=policy)
    again = plan(loads, topology, slots, policy=policy, current=before.table)
    if all(layer.ratio <= GOOD for layer in before.layers):
        assert again.copies == ()
    moved = [random.Random(seed).sample(layer, len(layer)) for layer in loads]
    after = plan(moved, topology, slots, policy=policy, current=before.table)
    for number, layer in enumerate(moved):
        assert after.layers[number].largest <= before.table.largest(number, layer) * (1 + 1e-9)
        assert after.layers[number].ratio <= GOOD or after.layers[number].reason
    held = {(n, e, h.rank) for n, es in enumerate(before.table.layers) for e, hs in enumerate(es) for h in hs}
    wanted = {
        (n, e, h.rank) for n, es in enumerate(after.table.layers) for e, hs in enumerate(es) for h in hs
    }
    assert {(c.layer, c.expert, c.rank) for c in after.copies} == wanted - held
    assert all((c.layer, c.expert, c.source) in held for c in after.copies)


@pytest.mark.parametrize("skew", [0.6, 0.8, 1.0, 1.2, 1.4])
@pytest.mark.parametrize("num_experts", [8, 16, 32, 64, 128, 256])
def test_published_skews_come_within_a_twentieth_of_the_bound(skew: float, num_experts: int) -> None:
    loads = [zipf(num_experts, skew)]
    for num_ranks in (2, 4, 8, 16, 32):
        for more in (0, 1, 2):
            topology = Topology(num_nodes=1, ranks_per_node=num_ranks)
            slots = -(-num_experts // num_ranks) + more
            if slots <= num_experts:
                found = plan(loads, topology, slots)
                assert found.worst.ratio <= GOOD, (num_ranks, slots, found.worst)


def test_a_small_change_of_load_copies_little_and_a_drift_less_than_all() -> None:
    topology = Topology(num_nodes=4, ranks_per_node=8)
    loads = zipf(256, 1.0)
    before = plan([loads], topology, 9)
    hot = loads.index(max(loads))
    warm = sorted(range(256), key=lambda e: -loads[e])[40]
    drifted = list(loads)
    drifted[hot], drifted[warm] = loads[warm], loads[hot]
    after = plan([drifted], topology, 9, current=before.table)
    assert after.layers[0].ratio <= GOOD < before.table.largest(0, drifted) / after.layers[0].bound.value
    assert 0 < len(after.copies) <= 16


def test_experts_that_stay_on_a_rank_stay_in_their_slot() -> None:
    start = contiguous(1, 8, ONE_NODE, 3)
    after = plan([zipf(8, 1.4)], ONE_NODE, 3, current=start)
    for expert, homes in enumerate(after.table.layers[0]):
        was = {home.rank: home.slot for home in start.homes(0, expert)}
        assert all(was.get(home.rank, home.slot) == home.slot for home in homes)


def test_lost_ranks_hold_nothing_and_their_experts_find_homes() -> None:
    loads = [zipf(16, 1.0)]
    before = plan(loads, ONE_NODE, 6)
    torn = replace(ONE_NODE, lost=frozenset({2}))
    after = plan(loads, torn, 6, current=before.table)
    assert all(home.rank != 2 for homes in after.table.layers[0] for home in homes)
    assert all(copy.source != 2 for copy in after.copies)
    orphans = [e for e, homes in enumerate(before.table.layers[0]) if {h.rank for h in homes} == {2}]
    assert {c.expert for c in after.copies if c.source is None} == set(orphans)
    assert after.worst.ratio <= GOOD


def test_a_table_made_for_any_node_becomes_one_by_node() -> None:
    loads, topology = [zipf(16, 1.2)], Topology(num_nodes=2, ranks_per_node=2)
    before = plan(loads, topology, 6)
    policy = Policy(by_node=True, num_groups=4)
    after = plan(loads, topology, 6, policy=policy, current=before.table)
    assert all(len({topology.node_of(h.rank) for h in homes}) == 1 for homes in after.table.layers[0])
    assert after.layers[0].ratio <= plan(loads, topology, 6, policy=policy).layers[0].ratio * 1.06


def test_the_reason_names_the_limit_that_matters() -> None:
    few = plan([[3.0, 3.0, 3.0, 2.0, 2.0]], Topology(num_nodes=1, ranks_per_node=2), 3)
    assert few.worst.ratio <= GOOD
    hot = [[9.0] + [1.0] * 7]
    even = plan(
        [[5.0, 4.0, 3.0]], Topology(num_nodes=1, ranks_per_node=2), 2, policy=Policy(even_shares=True)
    )
    assert "replicas share equally" in even.worst.reason
    groups = Policy(by_node=True, num_groups=4)
    two = Topology(num_nodes=2, ranks_per_node=2)
    assert plan(hot, two, 3, policy=groups).worst.bound.kind.startswith("hottest group")
    packed = plan([[5.0, 5.0, 5.0, 4.0, 4.0, 4.0]], Topology(num_nodes=1, ranks_per_node=4), 2)
    assert packed.worst.ratio <= GOOD or "slots" in packed.worst.reason


def test_points_of_the_unit_interval_meet_slots_by_their_shares() -> None:
    homes = (
        Home(rank=0, slot=0, share=0.25),
        Home(rank=1, slot=2, share=0.0),
        Home(rank=2, slot=4, share=0.75),
    )
    topology = Topology(num_nodes=1, ranks_per_node=3)
    table = Placement(topology=topology, slots_per_rank=2, layers=((homes,),))
    hits = [table.slot_for(0, 0, (i + 0.5) / 100) for i in range(100)]
    assert (hits.count(0), hits.count(2), hits.count(4)) == (25, 0, 75)


def test_fixed_placements_hold_every_expert_once() -> None:
    assert contiguous(2, 9, ONE_NODE, 3).occupants(1)[:3] == (0, 1, 2)
    assert round_robin(1, 8, ONE_NODE, 2).occupants(0) == (0, 4, 1, 5, 2, 6, 3, 7)
    with pytest.raises(ConfigError, match="too few"):
        contiguous(1, 9, ONE_NODE, 2)


@pytest.mark.parametrize(
    ("loads", "slots", "policy", "words"),
    [
        ([], 2, Policy(), "loads"),
        ([[1.0], [1.0, 2.0]], 2, Policy(), "loads"),
        ([[float("nan")] * 4], 2, Policy(), "loads"),
        ([[-1.0] * 4], 2, Policy(), "loads"),
        ([[1.0] * 9], 2, Policy(), "slots_per_rank: 9 experts on 4 ranks need 3"),
        ([[1.0] * 8], 2, Policy(by_node=True, num_groups=3), "num_groups"),
        ([[1.0] * 8], 3, Policy(), "current"),
    ],
)
def test_what_has_no_placement_is_refused(
    loads: list[list[float]], slots: int, policy: Policy, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(loads, ONE_NODE, slots, policy=policy, current=contiguous(1, 8, ONE_NODE, 2))


@pytest.mark.parametrize(
    ("homes", "words"),
    [
        ((), "no home"),
        ((Home(rank=0, slot=0, share=0.5), Home(rank=0, slot=1, share=0.5)), "twice"),
        ((Home(rank=0, slot=2, share=1.0),), "slot"),
        ((Home(rank=9, slot=18, share=1.0),), "slot"),
        ((Home(rank=0, slot=0, share=0.5),), "add up"),
        ((Home(rank=0, slot=0, share=float("nan")),), "add up"),
        ((Home(rank=0, slot=0, share=1.5), Home(rank=1, slot=2, share=-0.5)), "add up"),
    ],
)
def test_a_broken_table_is_refused(homes: tuple[Home, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Placement(topology=ONE_NODE, slots_per_rank=2, layers=((homes,),))
