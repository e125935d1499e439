"""Kernels of the mixture of experts: implementations against plain forms, rows that ignore neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from pdserve.kernels import native
from pdserve.kernels.grouped_linear import PackedGroups, grouped_linear, grouped_linear_reference
from pdserve.kernels.linear import linear
from pdserve.kernels.routing import (
    SlotOrder,
    TopK,
    combine,
    combine_reference,
    route_top_k,
    route_top_k_reference,
    sort_by_slot,
    sort_by_slot_reference,
)
from tests.conformance.kernel_kit import assert_near, both_dtypes, randn

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]
OPS: dict[str, dict[str, Callable[..., Any]]] = {
    "grouped_linear": {"native": grouped_linear, "reference": grouped_linear_reference},
    "route_top_k": {"native": route_top_k, "reference": route_top_k_reference},
    "sort_by_slot": {"native": sort_by_slot, "reference": sort_by_slot_reference},
    "combine": {"native": combine, "reference": combine_reference},
}
SIZES = {
    "one-row": [0, 1, 0],
    "decode": [1, 0, 2, 3, 0, 1],
    "prefill": [40, 0, 3, 130, 15],
    "all-to-one": [0, 300],
    "none": [0, 0],
}
every_split = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())


def implementations(op: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("impl", OPS[op].values(), ids=OPS[op].keys())


def offsets_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


class TestGroupedLinear:
    @both_dtypes
    @every_split
    @pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (33, 17), (130, 900)])
    @implementations("grouped_linear")
    def test_against_float64(
        self, impl: Callable[..., Any], dtype: str, sizes: list[int], num_out: int, num_in: int
    ) -> None:
        x, weights = randn(dtype, sum(sizes), num_in), randn(dtype, len(sizes), num_out, num_in)
        group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        exact = torch.einsum("mk,mnk->mn", x.double(), weights.double()[group])
        packed = PackedGroups.pack(weights)
        got = impl(x, offsets_of(sizes), packed)
        unrounded = impl(x, offsets_of(sizes), packed, out_float32=True)
        assert (got.shape, got.dtype) == (exact.shape, x.dtype)
        assert unrounded.dtype == torch.float32
        if sum(sizes):
            assert_near(got, exact, dtype)
            assert_near(unrounded, exact, "float32")

    @both_dtypes
    @every_split
    def test_rows_are_those_of_the_plain_linear_layer(self, dtype: str, sizes: list[int]) -> None:
        """Bit for bit, however many rows share a group: neighbours do not matter."""
        x, packed = randn(dtype, sum(sizes), 900), PackedGroups.pack(randn(dtype, len(sizes), 130, 900))
        bounds = offsets_of(sizes).tolist()
        for threads in (1, 2, 3):
            native.set_num_threads(threads)
            got = grouped_linear(x, offsets_of(sizes), packed, out_float32=True)
            for g in range(len(sizes)):
                rows = x[bounds[g] : bounds[g + 1]]
                alone = [linear(row[None], packed.group(g), out_float32=True) for row in rows[:20]]
                assert torch.equal(got[bounds[g] : bounds[g] + len(alone)], torch.cat([*alone, got[:0]]))

    def test_offsets_that_do_not_fit_the_rows_compute_nothing(self) -> None:
        packed = PackedGroups.pack(torch.randn(2, 8, 8))
        for wrong in ([0, 1, 4], [1, 2, 3], [0, 1, 2]):
            with pytest.raises(AssertionError, match="not those of the rows"):
                grouped_linear(torch.randn(3, 8), torch.tensor(wrong), packed)

    @both_dtypes
    def test_packing_and_replacing_lose_nothing(self, dtype: str) -> None:
        weights = randn(dtype, 3, 75, 131)
        packed = PackedGroups.pack(weights)
        fresh = randn(dtype, 75, 131)
        packed.replace(1, fresh)
        for group, wanted in enumerate((weights[0], fresh, weights[2])):
            assert torch.equal(packed.group(group).unpack(), wanted)


class TestRouting:
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k"), [(1, 2, 1), (7, 8, 2), (300, 60, 4), (3, 130, 8)]
    )
    @pytest.mark.parametrize("normalise", [False, True])
    @implementations("route_top_k")
    def test_choices_are_the_likeliest(
        self, impl: Callable[..., Any], tokens: int, experts: int, top_k: int, normalise: bool
    ) -> None:
        logits = torch.randn(tokens, experts) * 3
        chosen, weights = impl(logits, TopK(top_k=top_k, normalise=normalise))
        wanted = torch.topk(logits.double().softmax(-1), top_k)
        assert torch.equal(chosen, wanted.indices)
        scale = wanted.values.sum(-1, keepdim=True) if normalise else 1
        assert_near(weights, wanted.values / scale, "float32")

    @pytest.mark.parametrize("normalise", [False, True])
    @implementations("route_top_k")
    def test_groups_as_in_deepseek_v2(self, impl: Callable[..., Any], normalise: bool) -> None:
        """The best experts of the groups whose best expert is best."""
        logits = torch.randn(50, 12) * 2
        how = TopK(top_k=3, normalise=normalise, scale=2.5, groups=4, top_groups=2)
        chosen, weights = impl(logits, how)
        scores = logits.double().softmax(-1)
        for t, row in enumerate(scores.tolist()):
            groups = sorted(range(4), key=lambda g, row=row: -max(row[3 * g : 3 * g + 3]))[:2]
            allowed = sorted(
                (e for g in groups for e in range(3 * g, 3 * g + 3)), key=lambda e, row=row: -row[e]
            )
            assert chosen[t].tolist() == allowed[:3]
            whole = sum(row[e] for e in allowed[:3]) if normalise else 1.0
            wanted = [2.5 * row[e] / whole for e in allowed[:3]]
            assert weights[t].tolist() == pytest.approx(wanted, rel=1e-5)

    @implementations("route_top_k")
    def test_equals_deepseek_v3_s_router(self, impl: Callable[..., Any]) -> None:
        config = DeepseekV3Config(
            hidden_size=32, n_routed_experts=24, num_experts_per_tok=5, n_group=6, topk_group=3
        )
        theirs = DeepseekV3TopkRouter(config)
        torch.nn.init.normal_(theirs.weight)
        theirs.e_score_correction_bias.normal_()
        with torch.no_grad():
            logits, weights, chosen = theirs(torch.randn(60, 32))
        how = TopK(top_k=5, normalise=True, scale=2.5, sigmoid=True, groups=6, top_groups=3)
        ours = impl(logits, how, theirs.e_score_correction_bias)
        assert torch.equal(ours[0].sort().values, chosen.sort().values)
        order, their_order = ours[0].argsort(), chosen.argsort()
        assert_near(ours[1].gather(1, order), weights.gather(1, their_order), "float32")

    @implementations("route_top_k")
    def test_equal_experts_come_in_order(self, impl: Callable[..., Any]) -> None:
        chosen, weights = impl(torch.zeros(2, 6), TopK(top_k=3, normalise=True))
        assert chosen.tolist() == [[0, 1, 2]] * 2
        assert torch.equal(weights, torch.full((2, 3), 1 / 3))

    def test_values_that_are_not_numbers_still_choose_experts(self) -> None:
        """The row is reported as broken later; its neighbours and memory must be safe."""
        logits = torch.randn(3, 5)
        clean = route_top_k(logits, TopK(top_k=2, normalise=True))
        logits[1] = float("nan")
        chosen, weights = route_top_k(logits, TopK(top_k=2, normalise=True))
        assert chosen[1].tolist() == [0, 1]
        assert weights[1].isnan().all()
        for row in (0, 2):
            assert torch.equal(chosen[row], clean[0][row])
            assert torch.equal(weights[row], clean[1][row])

    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_sorting_is_stable_and_complete(self, data: st.DataObject) -> None:
        num_slots, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
        flat = data.draw(st.lists(st.integers(-1, num_slots - 1), max_size=40))
        slots = torch.tensor(flat[: len(flat) // top_k * top_k], dtype=torch.int64).view(-1, top_k)
        orders: list[SlotOrder] = [impl(slots, num_slots) for impl in OPS["sort_by_slot"].values()]
        for order in orders:
            assert order.offsets_S.tolist() == orders[0].offsets_S.tolist()
            assert order.row_of_TC.tolist() == orders[0].row_of_TC.tolist()
            assert order.token_of_M.tolist() == orders[0].token_of_M.tolist()
        bounds = orders[0].offsets_S.tolist()
        for token, row_slots in enumerate(slots.tolist()):
            for choice, slot in enumerate(row_slots):
                row = int(orders[0].row_of_TC[token, choice])
                assert (row == -1) == (slot == -1)
                if row >= 0:
                    assert bounds[slot] <= row < bounds[slot + 1]
                    assert int(orders[0].token_of_M[row]) == token
        assert sorted(r for r in orders[0].row_of_TC.flatten().tolist() if r >= 0) == list(range(bounds[-1]))


class TestCombine:
    @both_dtypes
    @pytest.mark.parametrize("shared", ["none", "plain", "scaled"])
    @implementations("combine")
    def test_against_float64(self, impl: Callable[..., Any], dtype: str, shared: str) -> None:
        rows, weights = randn(dtype, 25, 77), torch.rand(11, 3)
        row_of = torch.randint(-1, 25, (11, 3))
        row_of[4] = -1
        counts = (row_of >= 0).double()
        more = {} if shared == "none" else {"shared_TE": randn(dtype, 11, 77)}
        if shared == "scaled":
            more["shared_gate_T"] = torch.randn(11) * 4
        padded = torch.cat([rows.double(), torch.zeros(1, 77).double()])
        exact = (padded[row_of] * weights.double()[:, :, None]).sum(1)
        if more:
            gate = more.get("shared_gate_T", torch.full((11,), float("inf"))).double()
            exact += torch.sigmoid(gate)[:, None] * more["shared_TE"].double()
        got = impl(rows, row_of, weights, (weights * counts).sum(1).float(), **more)
        assert_near(got, exact, dtype)
        if shared == "none":
            assert torch.equal(got[4], torch.zeros(77, dtype=rows.dtype))

    @both_dtypes
    def test_equal_rows_of_whole_weight_give_that_row(self, dtype: str) -> None:
        y = randn(dtype, 6, 90)
        _, weights = route_top_k(torch.randn(6, 8), TopK(top_k=3, normalise=True))
        row_of = torch.arange(18).view(6, 3)
        assert torch.equal(combine(y.repeat_interleave(3, 0), row_of, weights, torch.ones(6)), y)

    @both_dtypes
    def test_a_token_does_not_depend_on_the_others(self, dtype: str) -> None:
        rows, weights, row_of = randn(dtype, 64, 50), torch.rand(30, 2), torch.randint(-1, 64, (30, 2))
        totals = weights.sum(1)
        together = combine(rows, row_of, weights, totals)
        for t in range(30):
            alone = combine(rows, row_of[t : t + 1], weights[t : t + 1], totals[t : t + 1])
            assert torch.equal(alone[0], together[t])
