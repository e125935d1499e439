"""Multi-head latent attention for one device (DeepSeek-V2, arXiv 2405.04434, section 2.1), weights absorbed.

What lives here: the order of kernels. The cache holds one latent row per position; the matrices that would
make keys and values of it are applied to the queries before and to the sums after attention. What does not:
weights' names (`pdserve.models.build_latent`), the kernel itself.

Legend: T tokens, E hidden size, H heads, N and P their dims without and with RoPE, R rank, C = R + P, V value
dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.grouped_linear import PackedGroups, grouped_linear
from pdserve.kernels.latent import latent_attention, write_latent
from pdserve.kernels.linear import Linear
from pdserve.kernels.norm import rms_norm
from pdserve.kernels.rope import apply_rope
from pdserve.layers.step import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryDown:
    """Queries by way of a low rank: a linear and its norm."""

    linear: Linear
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """layer: index into the cache. q: to [H, N + P] by token. kv_down: to [R + P].

    absorb: per head, from N to R. expand: per head, from R to V. scale: of scores. eps: of both norms.
    """

    layer: int
    q_down: QueryDown | None
    q: Linear
    kv_down: Linear
    kv_norm_R: torch.Tensor
    absorb: PackedGroups
    expand: PackedGroups
    out: Linear
    scale: float
    eps: float

    def attend(self, x_TE: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Writes this step's latent rows; returns the heads' results [T, H*V], before the projection."""
        tokens, heads, rank = x_TE.shape[0], self.absorb.num_groups, self.absorb.num_out
        q_THD = self._queries(x_TE).view(tokens, heads, -1)
        nope = self.absorb.num_in
        down_TC = self.kv_down(x_TE)
        q_THP, k_T1P = apply_rope(q_THD[:, :, nope:], down_TC[:, None, rank:], step.cos_TD, step.sin_TD)
        latent_TR = rms_norm(down_TC[:, :rank], self.kv_norm_R, self.eps)
        write_latent(torch.cat([latent_TR, k_T1P[:, 0]], dim=1), step.kv, self.layer, step.meta.slots_T)
        ends_H = torch.arange(heads + 1) * tokens
        q_MN = q_THD[:, :, :nope].transpose(0, 1).reshape(heads * tokens, nope)
        q_HTR = grouped_linear(q_MN, ends_H, self.absorb).view(heads, tokens, rank)
        q_HTC = torch.cat([q_HTR, q_THP.transpose(0, 1)], dim=2)
        sums_HTR = latent_attention(q_HTC, step.kv, self.layer, step.meta, rank=rank, scale=self.scale)
        out_MV = grouped_linear(sums_HTR.view(heads * tokens, rank), ends_H, self.expand)
        return out_MV.view(heads, tokens, -1).transpose(0, 1).reshape(tokens, -1)

    def _queries(self, x_TE: torch.Tensor) -> torch.Tensor:
        if self.q_down is None:
            return self.q(x_TE)
        return self.q(rms_norm(self.q_down.linear(x_TE), self.q_down.norm, self.eps))

    def project(self, heads_TF: torch.Tensor) -> torch.Tensor:
        """From the heads' results back to [T, E]."""
        return self.out(heads_TF)
