"""Router kinds against transformers and against the papers' formulas written out; who depends on whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
    load_balancing_loss_func,
)

from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.routing import TopK
from pdserve.layers.moe import ExpertLoad, ExpertMap, LocalExperts, MoE
from pdserve.layers.routers import (
    DROPPED,
    GShardRouter,
    Router,
    RouterKind,
    Routing,
    SwitchRouter,
    TokenChoice,
    capacity,
    make_router,
    route_gshard,
    route_switch,
)

HIDDEN, INNER, EXPERTS = 24, 20, 5


def logits_of(tokens: int, seed: int = 0, experts: int = EXPERTS) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 2


def gshard_written_out(logits: torch.Tensor, places: int, rnd: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Algorithm 1 of arXiv 2006.16668 for one group, line by line: combine weights [S, E], auxiliary loss."""
    gates = torch.softmax(logits.double(), dim=-1)
    tokens, experts = gates.shape
    combined, counts = torch.zeros(tokens, experts).double(), [0] * experts
    ranked = [sorted(range(experts), key=lambda e, s=s: -gates[s, e].item())[:2] for s in range(tokens)]
    for s, (e1, e2) in enumerate(ranked):
        if counts[e1] < places:
            combined[s, e1] = gates[s, e1] / (gates[s, e1] + gates[s, e2])
        counts[e1] += 1
    loss = sum(counts[e] / tokens * gates[:, e].mean().item() for e in range(experts)) / experts
    for s, (e1, e2) in enumerate(ranked):
        weight = gates[s, e2] / (gates[s, e1] + gates[s, e2])
        if counts[e2] < places and 2 * weight > rnd[s]:
            combined[s, e2] = weight
        counts[e2] += 1
    return combined, loss


def combined(routing: Routing, experts: int) -> torch.Tensor:
    """Weights [T, X] of a routing, zero where dropped or not chosen."""
    out = torch.zeros(routing.weights_TC.shape[0], experts + 1)
    out.scatter_(1, routing.experts_TC % (experts + 1), routing.weights_TC)
    return out[:, :experts]


class TestSwitch:
    @pytest.mark.parametrize("places", [1, 3, 100])
    def test_equals_transformers(self, places: int) -> None:
        config = SwitchTransformersConfig(d_model=HIDDEN, num_experts=EXPERTS, expert_capacity=places)
        theirs = SwitchTransformersTop1Router(config).eval()
        x = torch.randn(1, 40, HIDDEN, generator=torch.Generator().manual_seed(2)) * 5
        with torch.no_grad():
            one_hot, probs, logits = theirs(x)
        ours = route_switch(logits[0], places)
        kept = ours.experts_TC[:, 0] != DROPPED
        assert torch.equal(kept, one_hot[0].sum(-1) > 0)
        assert torch.equal(ours.experts_TC[kept, 0], one_hot[0].argmax(-1)[kept])
        assert torch.allclose(ours.weights_TC, probs[0], rtol=1e-6)
        assert torch.equal(ours.totals_T, ours.weights_TC[:, 0] * kept)

    def test_balance_loss_equals_transformers(self) -> None:
        logits = logits_of(50)
        probs = logits.softmax(-1)
        wanted = load_balancing_loss_func(probs[None], probs.argmax(-1)[None])
        router = SwitchRouter(factor=0.1)
        assert float(router.spread(logits).loss()) == pytest.approx(float(wanted), rel=1e-5)
        even = torch.eye(4).repeat(3, 1) * 50
        assert float(router.spread(even).loss()) == pytest.approx(1.0)

    def test_factor_sets_the_places(self) -> None:
        assert capacity(40, 5, 1, 1.25) == 10
        assert capacity(3, 8, 1, 1.0) == 1
        assert capacity(40, 5, 2, 1.0) == 16
        one_expert = torch.tensor([[3.0, 0, 0, 0]]).repeat(8, 1)
        kept = SwitchRouter(factor=1.5)(one_expert).experts_TC[:, 0]
        assert kept.tolist() == [0, 0, 0] + [DROPPED] * 5


class TestGShard:
    @given(
        tokens=st.integers(1, 40),
        experts=st.integers(2, 6),
        places=st.integers(1, 20),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=60, deadline=None)
    def test_equals_the_algorithm_written_out(
        self, tokens: int, experts: int, places: int, seed: int
    ) -> None:
        logits = logits_of(tokens, seed, experts)
        rnd = torch.rand(tokens, generator=torch.Generator().manual_seed(seed))
        wanted, loss = gshard_written_out(logits, places, rnd)
        ours = route_gshard(logits, places, rnd)
        assert torch.allclose(combined(ours, experts).double(), wanted, atol=1e-6)
        assert ours.totals_T.double().tolist() == pytest.approx(wanted.sum(1).tolist(), abs=1e-6)
        spread = GShardRouter(factor=1.0, seed=0).spread(logits)
        assert float(spread.loss()) / experts**2 == pytest.approx(loss, rel=1e-5)

    def test_second_expert_is_taken_in_proportion_to_its_weight(self) -> None:
        logits = torch.tensor([[2.0, 1.0, -9.0]]).repeat(4000, 1)
        routing = GShardRouter(factor=10.0, seed=3)(logits)
        second = float(routing.weights_TC[0, 1])
        share = float((routing.experts_TC[:, 1] != DROPPED).float().mean())
        assert share == pytest.approx(2 * second, abs=0.03)
        assert torch.equal(GShardRouter(10.0, 3)(logits).experts_TC, routing.experts_TC)


def layer(
    router: Router, dtype: torch.dtype, order: list[int] | None = None, num_slots: int = EXPERTS
) -> MoE:
    """A layer of random experts, the same ones in whichever slots."""
    random = torch.Generator().manual_seed(5)
    gate = torch.randn(EXPERTS, HIDDEN, generator=random)
    up, down = (
        torch.randn(EXPERTS, *shape, generator=random) / 5 for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    order = order or list(range(EXPERTS))
    placed = [torch.zeros(num_slots, *w.shape[1:]).index_copy_(0, torch.tensor(order), w) for w in (up, down)]
    packed = [PackedGroups.pack(w.to(dtype)) for w in placed]
    return MoE(
        layer=0,
        gate=PackedLinear.pack(gate.to(dtype)),
        router=router,
        experts=LocalExperts(gate_up=packed[0], down=packed[1], map=ExpertMap(order, num_slots)),
        shared=None,
        load=ExpertLoad(1, EXPERTS),
    )


def gate_of(moe: MoE) -> torch.Tensor:
    assert isinstance(moe.gate, PackedLinear)
    return moe.gate.unpack()


def rows(tokens: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestLayer:
    @given(tokens=st.integers(1, 30), data=st.data(), top_k=st.integers(1, EXPERTS), normalise=st.booleans())
    @settings(max_examples=40, deadline=None)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_token_choice_ignores_neighbours(
        self, dtype: torch.dtype, tokens: int, data: st.DataObject, top_k: int, normalise: bool
    ) -> None:
        moe = layer(TokenChoice(how=TopK(top_k=top_k, normalise=normalise)), dtype)
        x = rows(tokens, dtype)
        together = moe(x)
        chosen = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=tokens))
        assert torch.equal(moe(x[chosen]), together[chosen])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_where_experts_lie_changes_no_bit(self, dtype: torch.dtype) -> None:
        router = TokenChoice(how=TopK(top_k=2, normalise=True))
        plain, moved = layer(router, dtype), layer(router, dtype, [6, 0, 3, 1, 4], num_slots=7)
        x = rows(33, dtype)
        assert torch.equal(plain(x), moved(x))
        assert torch.equal(plain.load.counts_LX, moved.load.counts_LX)
        assert int(plain.load.counts_LX.sum()) == 66

    def test_a_row_without_places_is_zero_and_neighbours_matter(self) -> None:
        """What docs/moe.md says of capacity: late rows lose their expert to earlier ones."""
        moe = layer(
            make_router(RouterKind.SWITCH, TopK(top_k=1, normalise=False), None, capacity_factor=1, seed=0),
            torch.float32,
        )
        x = rows(1, torch.float32).repeat(10, 1)
        out = moe(x)
        assert out[:2].abs().sum() > 0
        assert torch.equal(out[2:], torch.zeros(8, HIDDEN))
        assert int(moe.load.counts_LX.sum()) == 2
        assert float(moe.load.balance()[0]) > 1

    def test_capacity_routing_is_in_float32_with_bfloat16_experts(self) -> None:
        seen: list[torch.Tensor] = []

        class Watching(SwitchRouter):
            def __call__(self, logits_TX: torch.Tensor) -> Routing:
                seen.append(logits_TX)
                return SwitchRouter.__call__(self, logits_TX)

        moe = layer(Watching(factor=8.0), torch.bfloat16)
        x = rows(20, torch.bfloat16)
        assert moe(x).dtype is torch.bfloat16
        exact = x.double() @ gate_of(moe).double().T
        assert seen[0].dtype is torch.float32
        assert (seen[0] - exact).abs().max() < 1e-5

    @pytest.mark.parametrize("kind", list(RouterKind))
    def test_equals_a_sum_over_experts_written_out(self, kind: RouterKind) -> None:
        top_k = 1 if kind is RouterKind.SWITCH else 2
        how = TopK(top_k=top_k, normalise=False)
        routers = [make_router(kind, how, None, capacity_factor=1.0, seed=4) for _ in range(2)]
        moe, x = layer(routers[0], torch.float32), rows(40, torch.float32)
        logits = (x.double() @ gate_of(moe).double().T).float()
        weights = combined(routers[1](logits), EXPERTS).double()
        assert isinstance(moe.experts, LocalExperts)
        wanted = torch.zeros(40, HIDDEN).double()
        for expert in range(EXPERTS):
            gate, up = (x.double() @ moe.experts.gate_up.group(expert).unpack().double().T).chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            wanted += weights[:, expert : expert + 1] * (
                hidden @ moe.experts.down.group(expert).unpack().double().T
            )
        assert (moe(x) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
