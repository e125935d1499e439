"""Loads of experts on their way from a worker's counters over the router to the client."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.api import ExpertReport
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.models.hf_config import config_from_hf
from pdserve.models.sharded_experts import expert_slots
from pdserve.parallel.expert_snapshot import snapshot_from_json
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Topology
from pdserve.rpc import convert
from pdserve.rpc.v1 import common_pb2
from pdserve.types import Role
from pdserve.worker.experts import EVERY_S, HALF_LIFE_S, ExpertWatch
from tests.support.router_kit import FakeWorker, fleet

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def report(name: str) -> ExpertReport:
    where = (((0, 0.75), (3, 0.25)), ((2, 1.0),))
    return ExpertReport(
        name=name, layers=(1,), loads=((30.0, 10.0),), ranks_per_node=2, slots_per_rank=2, homes=(where,),
        balance_losses=(1.25,),
    )  # fmt: skip


rows = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple)
homes = st.lists(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(0, 1)), max_size=2).map(tuple), max_size=2
)


@given(
    st.lists(st.tuples(st.integers(0, 99), rows, homes.map(tuple)), max_size=3), st.lists(st.integers(0, 9))
)
def test_a_report_is_the_same_after_the_wire(
    layers: list[tuple[int, tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]], lost: list[int]
) -> None:
    sent = ExpertReport(
        name="w", layers=tuple(n for n, _, _ in layers), loads=tuple(x for _, x, _ in layers), nodes=2,
        ranks_per_node=3, lost_ranks=tuple(lost), slots_per_rank=4, homes=tuple(h for _, _, h in layers),
        balance_losses=tuple(1.0 + n for n, _, _ in layers),
    )  # fmt: skip
    wire = convert.expert_report_to_pb(sent).SerializeToString()
    assert convert.expert_report_from_pb(common_pb2.ExpertReport.FromString(wire)) == sent


def test_slots_without_shares_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="shares"):
        convert.expert_report_from_pb(common_pb2.ExpertReport(layers=[{"homes": [{"slots": [1]}]}]))


def test_counts_enter_the_window_as_they_grow_and_fade() -> None:
    counts = torch.zeros(3, 2, dtype=torch.int64)
    counts[1] = torch.tensor([5, 5])
    watch = ExpertWatch("w", counts, [1, 2])  # layer 0 is dense; what was counted before does not count
    counts[1] += torch.tensor([8, 0])
    assert watch.report(100.0).loads == ((8.0, 0.0), (0.0, 0.0))
    counts[2] += torch.tensor([0, 3])
    assert watch.report(100.0 + EVERY_S / 2).loads[1] == (0.0, 0.0)  # too soon to look again
    later = watch.report(100.0 + HALF_LIFE_S)
    assert later.layers == (1, 2)
    assert later.loads == ((4.0, 0.0), (0.0, 3.0))
    counts.zero_()
    assert watch.report(100.0 + HALF_LIFE_S + EVERY_S).loads[0][0] < 4.0  # a reset counts nothing backwards


def test_a_report_is_a_snapshot_with_all_experts_on_one_rank() -> None:
    counts = torch.tensor([[3, 4, 5]])
    told = ExpertWatch("w", counts, [0]).report(1.0)
    snapshot = snapshot_from_json({name: getattr(told, name) for name in ExpertReport.__dataclass_fields__})
    assert snapshot.table.occupants(0) == (0, 1, 2)
    assert ExpertWatch("dense", None, []).report(1.0) == ExpertReport(name="dense")


def test_a_worker_with_a_placement_tells_of_it() -> None:
    table = plan([[5.0, 1.0, 1.0]], Topology(num_nodes=1, ranks_per_node=2), 2).table
    told = ExpertWatch("w", torch.zeros(2, 3, dtype=torch.int64), [1], 2, table).report(1.0)
    snapshot = snapshot_from_json({name: getattr(told, name) for name in ExpertReport.__dataclass_fields__})
    assert snapshot.table == table


async def test_the_router_asks_all_workers_or_one() -> None:
    first, second = FakeWorker("d1", Role.DECODE), FakeWorker("d2", Role.DECODE)
    first.experts, second.experts = report("d1"), report("d2")
    dense = FakeWorker("p1", Role.PREFILL)
    dense.experts = ExpertReport(name="p1")
    async with fleet(second, first, dense) as running:
        assert await running.client.get_experts() == (report("d1"), report("d2"))
        assert await running.client.get_experts("d2") == (report("d2"),)
        assert await running.client.get_experts("p1") == ()
        with pytest.raises(Unavailable):
            await running.client.get_experts("nobody")
        second.experts = None  # fails when asked
        assert await running.client.get_experts() == (report("d1"),)


def test_a_worker_of_several_ranks_tells_where_its_experts_lie() -> None:
    """The first ranks have one more, as `split` divides them."""
    config = config_from_hf({**MIXTRAL, "num_local_experts": 7})
    told = ExpertWatch("w", torch.zeros(2, 7, dtype=torch.int64), [0, 1], ranks=3).report(100.0)
    assert (told.ranks_per_node, told.slots_per_rank) == (3, 3)
    ranks = [slot // 3 for ((slot, _),) in told.homes[0]]
    assert ranks == [rank for rank, own in enumerate(expert_slots(config, 3)) for _ in own]
