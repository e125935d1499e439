"""What ranks do in the tests of all-to-all and of experts over ranks; the tests judge what they return.

Legend: T tokens, X experts, C choices per token, E hidden size, F inner size, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.kernels.linear import PackedLinear
from pdserve.layers.mlp import GatedMLP
from pdserve.layers.moe import ExpertLoad, ExpertMap, LocalExperts, MoE, SharedExpert
from pdserve.layers.replicas import ReplicaMap
from pdserve.layers.router_loss import Spread, probabilities
from pdserve.layers.routers import DROPPED, Routing
from pdserve.models import sharded
from pdserve.models.sharded_experts import ExpertSplit, over_ranks
from pdserve.parallel import expert_exchange
from pdserve.parallel.expert_exchange import ExpertExchange, OwnedRows, SharedRows
from pdserve.parallel.group import Group
from pdserve.parallel.shards import split
from tests.support.rank_cases import group_of, same_steps

ALWAYS, NEVER = -(1 << 60), 1 << 60
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXPERTS, CHOICES, WIDTH, INNER = 5, 2, 48, 40


def all_to_all(rank: int, size: int, folder: Path, exchange: str, rounds: int) -> dict[str, Any]:
    """What the two below say, of one group."""
    slot = {"slot_bytes": 192} if exchange == "shm" else {}
    group = group_of(rank, size, folder, exchange, **slot)
    return {"rows": rows_change_ranks(group, rounds), "experts": experts_over_ranks(group)}


def steps_all_to_all(rank: int, size: int, folder: Path, exchange: str, cases: list[list[Any]]) -> list[Any]:
    """`rank_cases.same_steps` with experts' rows by all-to-all, however few they are."""
    with patch.object(sharded, "SharedRows", partial(SharedRows, least_saving=ALWAYS)):
        return same_steps(rank, size, folder, exchange, cases)


def rows_change_ranks(group: Group, rounds: int) -> list[Any]:
    """All-to-alls of random counts, nothing at all and everything to one rank among them; the counts of those
    that were wrong, and the bytes that the traffic counted less those that left."""
    rank, size = group.rank, group.size
    random = torch.Generator().manual_seed(3)
    wrong, away = [], 0
    for number in range(rounds):
        counts_RR = torch.randint(0, 40, (size, size), generator=random)
        counts_RR[torch.rand(size, size, generator=random) < 0.3] = 0
        if number % 5 == 0:
            counts_RR[:, torch.arange(size) != number % size] = 0
        counts_RR[:, :] *= number % 11 != 0
        sent = [_marked(rank, to, int(counts_RR[rank, to]), number) for to in range(size)]
        wanted = [_marked(r, rank, int(counts_RR[r, rank]), number) for r in range(size)]
        got = group.all_to_all(torch.cat(sent), counts_RR.tolist())
        if not torch.equal(got, torch.cat(wanted)):
            wrong.append(counts_RR.tolist())
        away += 6 * int(counts_RR[rank].sum() - counts_RR[rank, rank])
    return [wrong, group.traffic.num_bytes - away]


def _marked(sender: int, receiver: int, rows: int, number: int) -> torch.Tensor:
    """Rows of three bfloat16 words that say whose they are."""
    words = torch.arange(3 * rows).view(rows, 3) + 997 * sender + 89 * receiver + 7 * number
    return words.to(torch.int16).view(torch.bfloat16)


@dataclass(frozen=True)
class Given:
    """A router that says what it was told, whatever the logits."""

    routing: Routing

    def __call__(self, logits_TX: torch.Tensor) -> Routing:
        return self.routing

    def spread(self, logits_TX: torch.Tensor) -> Spread:
        return Spread.of(torch.empty(0, 1, dtype=torch.int64), probabilities(logits_TX))


def choices() -> dict[str, torch.Tensor]:
    """experts_TC by name: what is likely to go wrong."""
    random = torch.Generator().manual_seed(5)
    even = torch.stack([torch.randperm(EXPERTS, generator=random)[:CHOICES] for _ in range(23)])
    some = torch.where(torch.rand(17, CHOICES, generator=random) < 0.4, DROPPED, even[:17])
    return {
        "even": even,
        "one token": even[:1],
        "fewer tokens than ranks": even[:2],
        "one expert takes everything": torch.full((19, 1), 3),
        "one rank takes everything": torch.tensor([[0, 1]] * 14),
        "some dropped": some,
        "all dropped": torch.full((6, CHOICES), DROPPED),
    }


def _layer(experts_TC: torch.Tensor, dtype: torch.dtype, homes: ExpertMap) -> MoE:
    """The same on every rank. Only its experts are replaced later."""
    random = torch.Generator().manual_seed(11)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    weights_TC = torch.rand(experts_TC.shape, generator=random)
    kept_TC = weights_TC * (experts_TC != DROPPED)
    routing = Routing(experts_TC=experts_TC, weights_TC=weights_TC, totals_T=kept_TC.sum(1))
    up, down = weight(EXPERTS, 2 * INNER, WIDTH), weight(EXPERTS, WIDTH, INNER)
    shared = GatedMLP(
        gate_up=PackedLinear.pack(weight(2 * INNER, WIDTH)), down=PackedLinear.pack(weight(WIDTH, INNER))
    )
    return MoE(
        layer=0,
        gate=PackedLinear.pack(weight(EXPERTS, WIDTH)),
        router=Given(routing),
        experts=LocalExperts(gate_up=PackedGroups.pack(up), down=PackedGroups.pack(down), map=homes),
        shared=SharedExpert(mlp=shared, gate=PackedLinear.pack(weight(1, WIDTH))),
        load=ExpertLoad(1, EXPERTS),
    )


def _held(size: int, replicas: bool) -> tuple[tuple[range, ...], tuple[int, ...], ExpertMap]:
    """(slots by rank, the expert in each slot, their map): in order, or with the first experts twice."""
    if not replicas:
        return split(EXPERTS, size), tuple(range(EXPERTS)), ExpertMap.identity(EXPERTS)
    held = (*range(EXPERTS), 0, 1, 2)
    homes = [[(slot, 1.0) for slot, e in enumerate(held) if e == expert] for expert in range(EXPERTS)]
    return split(len(held), size), held, ReplicaMap(homes, len(held))


def _on_ranks(moe: MoE, held: tuple[int, ...], homes: ExpertMap, exchange: ExpertExchange) -> MoE:
    """The layer with only our slots' experts."""
    local = moe.experts
    assert isinstance(local, LocalExperts)
    assert isinstance(exchange, SharedRows | OwnedRows)
    own = exchange.slots[exchange.group.rank]
    mine = list(held[own.start : own.stop])
    up, down = (
        PackedGroups.pack(torch.stack([groups.group(e).unpack() for e in mine]))
        for groups in (local.gate_up, local.down)
    )
    part = LocalExperts(gate_up=up, down=down, map=homes)
    whole = ExpertSplit(slots=exchange.slots, held={0: held}, maps={0: homes})
    return over_ranks(
        MoE(
            layer=0, gate=moe.gate, router=moe.router, experts=part, shared=moe.shared,
            load=ExpertLoad(1, EXPERTS),
        ),
        whole,
        exchange,
    )  # fmt: skip


def experts_over_ranks(group: Group) -> list[str]:
    """A mixture's layer over ranks against itself on one device, bit for bit; what differed, and what was not
    exchanged as it should."""
    wrong = []
    for name, experts_TC in choices().items():
        for dtype in DTYPES.values():
            for replicas in (False, True):
                slots, held, homes = _held(group.size, replicas)
                alone = _layer(experts_TC, dtype, ExpertMap.identity(EXPERTS))
                x_TE = torch.randn(len(experts_TC), WIDTH, generator=torch.Generator().manual_seed(2)).to(
                    dtype
                )
                wanted = alone(x_TE)
                # Gathered rows are put together, or found where they are.
                for least, expert_exchange.LEAST_IN_PLACE in ((ALWAYS, 0), (NEVER, 0), (NEVER, NEVER)):
                    shared = SharedRows(slots=slots, group=group, least_saving=least)
                    moe = _on_ranks(alone, held, homes, shared)
                    before = group.traffic.num_calls
                    same = torch.equal(moe(x_TE), wanted) and _same_load(moe, alone)
                    calls = group.traffic.num_calls - before
                    if not same or calls > (2 if least == ALWAYS else 1):
                        wrong.append(f"{name}, {dtype}, replicas {replicas}, {least}, {calls} calls")
                if not _owned(group, alone, x_TE, slots, held, homes, wanted):
                    wrong.append(f"{name}, {dtype}, replicas {replicas}, own tokens")
    return wrong


def _same_load(moe: MoE, alone: MoE) -> bool:
    return torch.equal(moe.load.counts_LX, alone.load.counts_LX)


def _owned(
    group: Group, alone: MoE, x_TE: torch.Tensor, slots: tuple[range, ...], held: tuple[int, ...],
    homes: ExpertMap, wanted: torch.Tensor,
) -> bool:  # fmt: skip
    """Each rank has tokens of its own: the first one none, the last one most."""
    last = group.rank == group.size - 1
    begin = max(0, group.rank - 1)
    own = slice(0, 0) if group.rank == 0 else slice(begin, len(x_TE) if last else begin + 1)
    router = alone.router
    assert isinstance(router, Given)
    given = router.routing
    part = Given(
        Routing(
            experts_TC=given.experts_TC[own],
            weights_TC=given.weights_TC[own],
            totals_T=given.totals_T[own],
        )
    )
    moe = _on_ranks(alone, held, homes, OwnedRows(slots=slots, group=group))
    object.__setattr__(moe, "router", part)
    return torch.equal(moe(x_TE[own]), wanted[own]) and _same_load(moe, alone)
