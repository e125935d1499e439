"""Experts with several slots: rows meet their own expert, shares hold, results are those of one copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.layers.moe import ExpertMap, LocalExperts
from pdserve.layers.replicas import ReplicaMap
from pdserve.layers.routers import DROPPED
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Placement, Topology


def placed(loads: list[float], ranks: int, slots: int) -> tuple[Placement, ReplicaMap]:
    table = plan([loads], Topology(num_nodes=1, ranks_per_node=ranks), slots).table
    homes = [[(home.slot, home.share) for home in homes] for homes in table.layers[0]]
    return table, ReplicaMap(homes, table.num_slots)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_goes_to_a_slot_that_holds_its_expert(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    loads = data.draw(st.lists(st.floats(0, 100), min_size=2, max_size=9))
    table, slots = placed(loads, ranks, -(-len(loads) // ranks) + data.draw(st.integers(0, 3)))
    chosen = data.draw(st.lists(st.tuples(*[st.integers(DROPPED, len(loads) - 1)] * 2), max_size=30))
    experts_TC = torch.tensor(chosen, dtype=torch.int64).view(-1, 2)
    slots_TC = slots(experts_TC)
    occupants = [*table.occupants(0), DROPPED]  # DROPPED is slot -1
    assert [occupants[slot] for slot in slots_TC.flatten().tolist()] == experts_TC.flatten().tolist()
    used = slots_TC[slots_TC != DROPPED]
    offsets_S = torch.cat(
        [torch.zeros(1, dtype=torch.int64), used.bincount(minlength=table.num_slots).cumsum(0)]
    )
    kept = experts_TC[experts_TC != DROPPED]
    assert slots.counts(offsets_S).tolist() == kept.bincount(minlength=len(loads)).tolist()


def test_rows_are_spread_by_shares_also_of_tokens_that_are_few() -> None:
    slots = ReplicaMap([[(0, 0.5), (1, 0.125), (2, 0.375)], [(4, 0.0), (3, 2.0)]], num_slots=5)
    taken = slots(torch.zeros(800, 1, dtype=torch.int64)).flatten().bincount(minlength=5)
    assert taken.tolist() == pytest.approx([400, 100, 300, 0, 0], abs=3)
    odd = slots(torch.zeros(801, 1, dtype=torch.int64))[::7].flatten().bincount(minlength=3)
    assert (odd / odd.sum()).tolist() == pytest.approx([0.5, 0.125, 0.375], abs=0.05)
    assert slots(torch.ones(9, 1, dtype=torch.int64)).unique().tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_give_the_bits_of_one_copy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts, width, inner = 6, 32, 48
    up, down = torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner)
    table, slots = placed([50, 20, 10, 5, 5, 1], 3, 3)
    held = torch.tensor([0 if expert is None else expert for expert in table.occupants(0)])
    one = LocalExperts(
        gate_up=PackedGroups.pack(up.to(dtype)),
        down=PackedGroups.pack(down.to(dtype)),
        map=ExpertMap.identity(experts),
    )
    many = LocalExperts(
        gate_up=PackedGroups.pack(up[held].to(dtype)), down=PackedGroups.pack(down[held].to(dtype)), map=slots
    )
    x_TE = torch.randn(40, width).to(dtype)
    experts_TC = torch.stack([torch.randperm(experts)[:2] for _ in range(40)])
    left, right = one(x_TE, experts_TC), many(x_TE, experts_TC)
    assert torch.equal(left.rows_ME[left.row_of_TC], right.rows_ME[right.row_of_TC])
    assert torch.equal(left.counts_X, right.counts_X)


@pytest.mark.parametrize(
    ("homes", "words"),
    [
        ([[(0, 1.0)], [(0, 1.0)]], "slot of its own"),
        ([[(0, 0.5), (5, 0.5)]], "exists"),
        ([[]], "shares"),
        ([[(0, 0.0)]], "shares"),
        ([[(0, 1.5), (1, -0.5)]], "shares"),
        ([[(0, float("nan"))]], "shares"),
    ],
)
def test_broken_maps_are_refused(homes: list[list[tuple[int, float]]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReplicaMap(homes, num_slots=3)
