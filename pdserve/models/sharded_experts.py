"""Experts over the ranks of a replica: each rank computes the rows of its slots, and all get all rows.

What lives here: cutting the experts' weights, and the `ExpertRunner` that exchanges rows. What does not: the
layer around it (`pdserve.layers.moe`), attention's ranks (`sharded`), which table is best
(`pdserve.parallel`).

Ranks of one replica have the same input after attention, so they route and sort alike, and nothing needs to
be dispatched: rank r's rows are one run of the sorted rows. Rows come back by one gather, padded to the
fullest rank; the weighted sum is then every rank's own. No number is added across ranks, so the bits are
those of one device in every mode.

Legend: T tokens, C choices per token, M rows of all ranks, S slots, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.activation import silu_mul
from pdserve.kernels.grouped_linear import PackedGroups, grouped_linear
from pdserve.kernels.routing import sort_by_slot
from pdserve.layers.moe import ExpertMap, ExpertRows, LocalExperts, MoE
from pdserve.models.config import ModelConfig
from pdserve.parallel.group import Group
from pdserve.parallel.shards import split

_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def expert_slots(config: ModelConfig, size: int) -> tuple[range, ...]:
    """Slots by rank, in order of experts; empty without experts. Raises ConfigError for too many ranks."""
    if config.experts is None:
        return ()
    if config.experts.num_experts < size:
        raise ConfigError(f"tp: {size} ranks are more than the model's {config.experts.num_experts} experts")
    return split(config.experts.num_experts, size)


def cut_experts(weights: Mapping[str, torch.Tensor], own: range) -> dict[str, torch.Tensor]:
    """The weights with the rank's experts alone, as views."""
    return {
        name: weight[own.start : own.stop] if name.endswith(_STACKED) else weight
        for name, weight in weights.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """gate_up, down: of our slots, slots[group.rank]. slots: by rank, in order, all of the map's."""

    gate_up: PackedGroups
    down: PackedGroups
    map: ExpertMap
    slots: tuple[range, ...]
    group: Group

    def __call__(self, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> ExpertRows:
        """See `ExpertRunner`. Every rank calls it with the same arguments."""
        order = sort_by_slot(self.map(experts_TC), self.map.num_slots)
        bounds = order.offsets_S[[0, *(part.stop for part in self.slots)]].tolist()
        begin, end = bounds[self.group.rank : self.group.rank + 2]
        own = self.slots[self.group.rank]
        offsets_S = order.offsets_S[own.start : own.stop + 1] - begin
        x_ME = x_TE.index_select(0, order.token_of_M[begin:end])
        hidden_MF = silu_mul(grouped_linear(x_ME, offsets_S, self.gate_up))
        return ExpertRows(
            rows_ME=self._gathered(grouped_linear(hidden_MF, offsets_S, self.down), bounds),
            row_of_TC=order.row_of_TC,
            counts_X=order.offsets_S.diff()[self.map.slots_X],
        )

    def _gathered(self, ours_ME: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """All ranks' rows, in order of slot."""
        counts = [end - begin for begin, end in pairwise(bounds)]
        most = max(counts)
        if most == 0:
            return ours_ME
        padded = ours_ME.new_zeros(most, ours_ME.shape[1])
        padded[: len(ours_ME)] = ours_ME
        whole = self.group.gather(padded)
        return torch.cat([rows[:count] for rows, count in zip(whole, counts, strict=True)])


def over_ranks(moe: MoE, slots: tuple[range, ...], group: Group) -> MoE:
    """A layer built of the rank's own experts, joined to the other ranks'."""
    local = moe.experts
    assert isinstance(local, LocalExperts)
    joined = RankExperts(gate_up=local.gate_up, down=local.down, map=local.map, slots=slots, group=group)
    return dataclasses.replace(moe, experts=joined)
