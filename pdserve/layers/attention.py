"""The attention half of a decoder layer, for one device: fused projection, RoPE, KV write, paged attention.

What lives here: the order of kernels. What does not: norms and residuals around it (`block`), weights' names.

Legend: T tokens, E hidden size, H query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.attention import paged_attention
from pdserve.kernels.linear import Linear
from pdserve.kernels.norm import rms_norm
from pdserve.kernels.rope import rope_and_write_kv
from pdserve.layers.step import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeNorm:
    """RMS norm weights over all query heads together, and over all key heads (OLMoE). F: H * D, or K * D."""

    q_F: torch.Tensor
    k_F: torch.Tensor

    @classmethod
    def of(cls, q_F: torch.Tensor | None, k_F: torch.Tensor | None) -> WholeNorm | None:
        """None unless both are there."""
        return None if q_F is None or k_F is None else cls(q_F=q_F, k_F=k_F)

    def __call__(self, qkv_TF: torch.Tensor, eps: float) -> torch.Tensor:
        """The fused projection with its query and key parts normed."""
        end_q = self.q_F.shape[0]
        end_k = end_q + self.k_F.shape[0]
        q_TF = rms_norm(qkv_TF[:, :end_q], self.q_F, eps)
        k_TF = rms_norm(qkv_TF[:, end_q:end_k], self.k_F, eps)
        return torch.cat([q_TF, k_TF, qkv_TF[:, end_k:]], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """layer: index into the cache. window: positions a token sees with itself, 0 for all.

    q_norm_D, k_norm_D: RMS norm weights on each head (Qwen3), or None. whole_norm: over all heads at once, or
    None. clip: bound of queries, keys and values, after norms and before RoPE, or None.
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
    whole_norm: WholeNorm | None = None
    clip: float | None = None

    def attend(self, x_TE: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Writes this step's keys and values; returns the heads' results [T, H*D], before the projection."""
        q_THD = rope_and_write_kv(
            self._projected(x_TE),
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

    def _projected(self, x_TE: torch.Tensor) -> torch.Tensor:
        """q, k and v side by side [T, F], normed and clipped where the model wants that over whole parts."""
        qkv_TF = self.qkv(x_TE)
        if self.whole_norm is not None:
            qkv_TF = self.whole_norm(qkv_TF, self.eps)
        return qkv_TF if self.clip is None else qkv_TF.clamp_(-self.clip, self.clip)

    def project(self, heads_TF: torch.Tensor) -> torch.Tensor:
        """From the heads' results back to [T, E]."""
        return self.out(heads_TF)
