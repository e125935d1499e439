"""Latent attention from named weights: even and odd rotary rows put apart, kv_b split and absorbed, packed.

What lives here: which weight goes where in `LatentAttention`. What does not: other layers (`build`).

Legend: H heads, N and P their dims without and with RoPE, R rank, V value dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.kernels.linear import PackedLinear
from pdserve.layers.latent import LatentAttention, QueryDown
from pdserve.models.config import LatentConfig, ModelConfig

NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever rms_norm_eps says (as in transformers)."""
Weights = Mapping[str, torch.Tensor]


def _packed(weights: Weights, name: str, order: torch.Tensor | None, deterministic: bool) -> PackedLinear:
    """A linear whose outputs are put in `order`."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if order is not None:
        weight, bias = weight[order], None if bias is None else bias[order]
    return PackedLinear.pack(weight, bias, deterministic=deterministic)


def _order(x: LatentConfig, before: int, heads: int) -> torch.Tensor | None:
    """Rows of `heads` times `before` plain and P rotary ones, pairs of the latter turned into two halves."""
    if not x.interleaved:
        return None
    rotary = torch.cat([torch.arange(0, x.rope_dim, 2), torch.arange(1, x.rope_dim, 2)]) + before
    one = torch.cat([torch.arange(before), rotary])
    return (torch.arange(heads)[:, None] * one.numel() + one).flatten()


def build_latent(
    config: ModelConfig, x: LatentConfig, weights: Weights, layer: int, deterministic: bool
) -> LatentAttention:
    """One layer's attention. x: config.latent."""
    prefix = f"model.layers.{layer}.self_attn."
    heads = config.num_heads
    queries = _order(x, x.nope_dim, heads)
    down = None
    if x.q_rank is not None:
        linear = _packed(weights, f"{prefix}q_a_proj", None, deterministic)
        down = QueryDown(linear=linear, norm=weights[f"{prefix}q_a_layernorm.weight"])
    kv_b_HFR = weights[f"{prefix}kv_b_proj.weight"].view(heads, x.nope_dim + x.v_dim, x.kv_rank)
    return LatentAttention(
        layer=layer,
        q_down=down,
        q=_packed(weights, f"{prefix}{'q_proj' if down is None else 'q_b_proj'}", queries, deterministic),
        kv_down=_packed(weights, f"{prefix}kv_a_proj_with_mqa", _order(x, x.kv_rank, 1), deterministic),
        kv_norm_R=weights[f"{prefix}kv_a_layernorm.weight"],
        absorb=PackedGroups.pack(kv_b_HFR[:, : x.nope_dim].transpose(1, 2)),
        expand=PackedGroups.pack(kv_b_HFR[:, x.nope_dim :]),
        out=_packed(weights, f"{prefix}o_proj", None, deterministic),
        scale=x.scale,
        eps=NORM_EPS,
    )
