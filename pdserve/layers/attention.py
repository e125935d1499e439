"""The attention half of a decoder layer, for one device: fused projection, RoPE, KV write, paged attention.

What lives here: the order of kernels. What does not: norms and residuals around it (`block`), weights' names.

Legend: T tokens, E hidden size, H query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.attention import paged_attention
from pdserve.kernels.linear import Linear
from pdserve.kernels.rope import rope_and_write_kv
from pdserve.layers.step import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """layer: index into the cache. window: positions a token sees with itself, 0 for all.

    q_norm_D, k_norm_D: RMS norm weights on each head (Qwen3), or None.
    """

    layer: int
    qkv: Linear
    out: Linear
    num_heads: int
    scale: float
    window: int
    eps: float
    q_norm_D: torch.Tensor | None = None
    k_norm_D: torch.Tensor | None = None

    def attend(self, x_TE: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Writes this step's keys and values; returns the heads' results [T, H*D], before the projection."""
        q_THD = rope_and_write_kv(
            self.qkv(x_TE),
            step.cos_TD,
            step.sin_TD,
            step.kv,
            self.layer,
            step.meta.slots_T,
            num_heads=self.num_heads,
            q_norm_D=self.q_norm_D,
            k_norm_D=self.k_norm_D,
            eps=self.eps,
        )
        heads_THD = paged_attention(
            q_THD, step.kv, self.layer, step.meta, scale=self.scale, window=self.window
        )
        return heads_THD.view(x_TE.shape[0], -1)

    def project(self, heads_TF: torch.Tensor) -> torch.Tensor:
        """From the heads' results back to [T, E]."""
        return self.out(heads_TF)
