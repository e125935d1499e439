"""Experts over the ranks of a replica: each rank computes the rows of its slots.

What lives here: cutting the experts' weights, and the `ExpertRunner` whose experts lie on ranks. What does
not: the layer around it (`pdserve.layers.moe`), who sends which rows (`pdserve.parallel.expert_exchange`),
attention's ranks (`sharded`), which table is best (`pdserve.parallel`).

Ranks of one replica have the same input after attention, so they route and sort alike (`SharedRows`), or each
has rows of its own (`OwnedRows`). No number is added across ranks, so the bits are those of one device in
every mode.

Legend: T tokens, C choices per token, M rows of our slots, S slots, E hidden size, F inner size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.activation import silu_mul
from pdserve.kernels.grouped_linear import PackedGroups, grouped_linear
from pdserve.layers.moe import ExpertMap, ExpertRows, LocalExperts, MoE
from pdserve.layers.replicas import ReplicaMap
from pdserve.models.config import ModelConfig
from pdserve.parallel.expert_exchange import ExpertExchange
from pdserve.parallel.placement_table import Placement
from pdserve.parallel.shards import split

_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def expert_slots(config: ModelConfig, size: int) -> tuple[range, ...]:
    """Slots by rank, in order of experts; empty without experts. Raises ConfigError for too many ranks."""
    if config.experts is None:
        return ()
    if config.experts.num_experts < size:
        raise ConfigError(f"tp: {size} ranks are more than the model's {config.experts.num_experts} experts")
    return split(config.experts.num_experts, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSplit:
    """Where all experts lie. slots: by rank, one after the other. held: the expert in each slot, and maps: by
    layer, of those that have experts.
    """

    slots: tuple[range, ...]
    held: Mapping[int, tuple[int, ...]]
    maps: Mapping[int, ExpertMap]

    def cut(self, weights: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """The weights with the rank's experts alone: views where these are a run, else copies."""
        return {
            name: self._own(weight, rank, int(name.split(".")[2])) if name.endswith(_STACKED) else weight
            for name, weight in weights.items()
        }

    def _own(self, weight: torch.Tensor, rank: int, layer: int) -> torch.Tensor:
        own = self.slots[rank]
        experts = self.held[layer][own.start : own.stop]
        if experts == tuple(range(experts[0], experts[0] + len(experts))):
            return weight[experts[0] : experts[-1] + 1]
        return weight[list(experts)]


def split_experts(config: ModelConfig, size: int, table: Placement | None = None) -> ExpertSplit | None:
    """In order of experts, or as the table says, replicas included; None for a model without experts.

    Raises ConfigError for too many ranks, and for a table of another model or number of ranks.
    """
    if config.experts is None:
        if table is not None:
            raise ConfigError("expert_placement: this model has no experts")
        return None
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    number = config.experts.num_experts
    if table is None:
        every = tuple(range(number))
        same = ExpertMap.identity(number)
        return ExpertSplit(
            slots=expert_slots(config, size),
            held=dict.fromkeys(layers, every),
            maps=dict.fromkeys(layers, same),
        )
    if (table.num_layers, table.num_experts) != (len(layers), number):
        raise ConfigError("expert_placement: the table is for another model")
    if table.topology.num_ranks != size or table.topology.lost:
        raise ConfigError(f"expert_placement: the table is not for {size} ranks")
    return ExpertSplit(
        slots=tuple(range(r * table.slots_per_rank, (r + 1) * table.slots_per_rank) for r in range(size)),
        # Nothing is routed to an empty slot: any weights will do there.
        held={layer: tuple(e or 0 for e in table.occupants(n)) for n, layer in enumerate(layers)},
        maps={layer: _map_of(table, n) for n, layer in enumerate(layers)},
    )


def _map_of(table: Placement, number: int) -> ReplicaMap:
    homes = [[(home.slot, home.share) for home in of_expert] for of_expert in table.layers[number]]
    return ReplicaMap(homes, table.num_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """gate_up, down: of our slots. exchange: brings rows to them and back."""

    gate_up: PackedGroups
    down: PackedGroups
    map: ExpertMap
    exchange: ExpertExchange

    def __call__(self, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> ExpertRows:
        """See `ExpertRunner`. Every rank calls it in the same order."""
        sent = self.exchange.dispatch(x_TE, self.map(experts_TC))
        hidden_MF = silu_mul(grouped_linear(sent.x_ME, sent.offsets_S, self.gate_up))
        back = self.exchange.combine(grouped_linear(hidden_MF, sent.offsets_S, self.down), sent)
        return ExpertRows(
            rows_ME=back.rows_NE,
            row_of_TC=back.row_of_OC,
            counts_X=self.map.counts(sent.all_offsets_S),
            tokens=back.tokens,
        )

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See `ExpertRunner`."""
        return self.exchange.join(out_OE, num_tokens)


class Comparison(Protocol):
    """Another table beside the one that serves."""

    same: bool | None

    def compare(self, serving: RankExperts, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> None:
        """Computes rows with both; sets `same`."""
        ...


class SwapExperts:
    """Experts over ranks whose table changes between two steps, on all ranks at the same one."""

    def __init__(self, experts: RankExperts) -> None:
        self.current = experts
        self.trial: Comparison | None = None

    def __call__(self, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> ExpertRows:
        """See `ExpertRunner`. With a trial, that is shown the first rows that come by: if all ranks have
        them, for it exchanges rows. Else it waits for rows of its own (`ExpertBank.probe`)."""
        trial = self.trial
        if trial is not None and trial.same is None and len(x_TE) and self.current.exchange.alike:
            trial.compare(self.current, x_TE, experts_TC)
        return self.current(x_TE, experts_TC)

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See `ExpertRunner`."""
        return self.current.join(out_OE, num_tokens)


def over_ranks(moe: MoE, split: ExpertSplit, exchange: ExpertExchange) -> MoE:
    """A layer built of the rank's own experts, joined to the other ranks'."""
    local = moe.experts
    assert isinstance(local, LocalExperts)
    joined = RankExperts(gate_up=local.gate_up, down=local.down, map=split.maps[moe.layer], exchange=exchange)
    return dataclasses.replace(moe, experts=SwapExperts(joined))
