"""The feed-forward half of a decoder layer, for one device: SwiGLU with gate and up projections fused.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.activation import silu_mul
from pdserve.kernels.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """gate_up: rows of gate, then of up."""

    gate_up: Linear
    down: Linear

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] to [T, E]."""
        return self.down(silu_mul(self.gate_up(x_TE)))
