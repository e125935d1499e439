"""Experts that lie in several slots: which copy computes a token's row. For one device; shares come from
outside.

What lives here: the map from experts to slots of a placement with replicas. What does not: choosing the
placement (`pdserve.parallel.placement`), ranks, weights.

Legend: T tokens, X experts, C choices per token, S slots, R copies of an expert at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from pdserve.errors import ConfigError
from pdserve.layers.moe import ExpertMap

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly over [0, 1) in any run of consecutive tokens (a Kronecker
sequence).
"""


class ReplicaMap(ExpertMap):
    """An expert's rows go to its slots in proportion to their shares, by the token's place in the step.

    All copies hold the same weights and a row's value depends on its token and expert alone, so the choice of
    a copy never changes a result. slots_X: the first slot of each expert.
    """

    def __init__(self, homes: Sequence[Sequence[tuple[int, float]]], num_slots: int) -> None:
        """homes: by expert, (slot, share) of every copy. Raises ConfigError unless each expert has a slot, no
        slot is used twice, and shares are numbers from 0 of which one is more.
        """
        used = [slot for of_expert in homes for slot, _ in of_expert]
        if len(set(used)) != len(used) or any(not 0 <= slot < num_slots for slot in used):
            raise ConfigError("an expert map must give every copy a slot of its own that exists")
        if any(not sum(share for _, share in h) > 0 or min(share for _, share in h) < 0 for h in homes):
            raise ConfigError("an expert map needs shares from 0 for each expert, and one above it")
        super().__init__([of_expert[0][0] for of_expert in homes], num_slots)
        most = max(len(of_expert) for of_expert in homes)
        rows = [[slot for slot, _ in h] + [h[-1][0]] * (most - len(h)) for h in homes]
        # One more row, so that DROPPED (-1) maps to itself.
        self._slots_XR = torch.tensor([*rows, [int(self._slots[-1])] * most], dtype=torch.int64)
        self._edges_XR = torch.tensor(
            [*(_edges([share for _, share in h], most) for h in homes), [1.0] * most]
        )
        self._expert_S = torch.full((num_slots,), len(homes), dtype=torch.int64)
        for expert, of_expert in enumerate(homes):
            self._expert_S[[slot for slot, _ in of_expert]] = expert

    def __call__(self, experts_TC: torch.Tensor) -> torch.Tensor:
        """Slots of experts, DROPPED where dropped."""
        point_T = torch.arange(1, len(experts_TC) + 1, dtype=torch.float64).mul_(GOLDEN).frac_().float()
        copy_TC = (point_T[:, None, None] >= self._edges_XR[experts_TC]).sum(-1, keepdim=True)
        last = self._slots_XR.shape[1] - 1
        return self._slots_XR[experts_TC].gather(-1, copy_TC.clamp_(max=last)).squeeze(-1)

    def counts(self, offsets_S: torch.Tensor) -> torch.Tensor:
        """Rows by expert, over its copies."""
        counts_X = torch.zeros(len(self.slots_X) + 1, dtype=torch.int64)
        return counts_X.index_add_(0, self._expert_S, offsets_S.diff())[:-1]


def _edges(shares: Sequence[float], most: int) -> list[float]:
    """Where each copy's part of [0, 1) ends; no point lies beyond the last copy's."""
    ends = list(accumulate(shares))
    return [end / ends[-1] for end in ends[:-1]] + [1.0] * (most - len(ends) + 1)
