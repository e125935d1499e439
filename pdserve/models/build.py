"""From named weights to a runnable decoder: fusing q, k, v and gate, up, and packing for the kernels.

What lives here: which weight goes where. What does not: reading files (`loader`), running (`decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdserve.kernels.embedding import TokenTable
from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.routing import TopK
from pdserve.layers.attention import Attention, WholeNorm
from pdserve.layers.latent import LatentAttention
from pdserve.layers.mlp import GatedMLP
from pdserve.layers.moe import ExpertLoad, ExpertMap, LocalExperts, MoE, SharedExpert
from pdserve.layers.rope import RopeTable
from pdserve.layers.routers import make_router
from pdserve.models.build_latent import build_latent
from pdserve.models.config import ExpertsConfig, ModelConfig
from pdserve.models.decoder import Decoder, DecoderLayer, FeedForward
from pdserve.models.weights import BIAS

Weights = Mapping[str, torch.Tensor]


def _fused(weights: Weights, prefix: str, names: tuple[str, ...], deterministic: bool) -> PackedLinear:
    """One packed linear whose outputs are those of `names`, one after the other."""
    weight = torch.cat([weights[f"{prefix}{n}.weight"] for n in names])
    biased = f"{prefix}{names[0]}.bias" in weights
    bias = torch.cat([weights[f"{prefix}{n}.bias"] for n in names]) if biased else None
    return PackedLinear.pack(weight, bias, deterministic=deterministic)


def _attention(config: ModelConfig, weights: Weights, layer: int, deterministic: bool) -> Attention:
    prefix = f"model.layers.{layer}.self_attn."
    q_norm, k_norm = weights.get(f"{prefix}q_norm.weight"), weights.get(f"{prefix}k_norm.weight")
    return Attention(
        layer=layer,
        qkv=_fused(weights, prefix, ("q_proj", "k_proj", "v_proj"), deterministic),
        out=_fused(weights, prefix, ("o_proj",), deterministic),
        num_heads=config.num_heads,
        scale=config.head_dim**-0.5,
        window=config.windows[layer],
        eps=config.rms_norm_eps,
        q_norm_D=q_norm if config.qk_norm else None,
        k_norm_D=k_norm if config.qk_norm else None,
        whole_norm=WholeNorm.of(q_norm, k_norm) if config.qk_norm_whole else None,
        clip=config.clip_qkv,
    )


def _any_attention(
    config: ModelConfig, weights: Weights, layer: int, deterministic: bool
) -> Attention | LatentAttention:
    if config.latent is not None:
        return build_latent(config, config.latent, weights, layer, deterministic)
    return _attention(config, weights, layer, deterministic)


def _gated(weights: Weights, prefix: str, deterministic: bool) -> GatedMLP:
    return GatedMLP(
        gate_up=_fused(weights, prefix, ("gate_proj", "up_proj"), deterministic),
        down=_fused(weights, prefix, ("down_proj",), deterministic),
    )


def _top_k(x: ExpertsConfig) -> TopK:
    return TopK(
        top_k=x.top_k,
        normalise=x.normalise,
        scale=x.scale,
        sigmoid=x.sigmoid,
        groups=x.groups,
        top_groups=x.top_groups,
    )


def _moe(x: ExpertsConfig, weights: Weights, layer: int, load: ExpertLoad, deterministic: bool) -> MoE:
    prefix = f"model.layers.{layer}.mlp."
    shared = None
    if x.shared_size:
        shared = SharedExpert(
            mlp=_gated(weights, f"{prefix}shared_expert.", deterministic),
            gate=_fused(weights, prefix, ("shared_expert_gate",), deterministic) if x.shared_gate else None,
        )
    return MoE(
        layer=layer,
        gate=_fused(weights, prefix, ("gate",), deterministic),
        router=make_router(
            x.router, _top_k(x), weights.get(f"{prefix}gate.{BIAS}"),
            capacity_factor=x.capacity_factor, seed=x.seed + layer,
        ),
        experts=LocalExperts(
            gate_up=PackedGroups.pack(weights[f"{prefix}experts.gate_up_proj"]),
            down=PackedGroups.pack(weights[f"{prefix}experts.down_proj"]),
            map=ExpertMap.identity(x.num_experts),
        ),
        shared=shared,
        load=load,
    )  # fmt: skip


def _layer(
    config: ModelConfig, weights: Weights, layer: int, load: ExpertLoad | None, deterministic: bool
) -> DecoderLayer:
    prefix = f"model.layers.{layer}."
    last = layer == config.num_layers - 1
    following = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
    mlp: FeedForward
    if config.experts is not None and load is not None and config.has_experts(layer):
        mlp = _moe(config.experts, weights, layer, load, deterministic)
    else:
        mlp = _gated(weights, f"{prefix}mlp.", deterministic)
    return DecoderLayer(
        attention=_any_attention(config, weights, layer, deterministic),
        mlp=mlp,
        mlp_norm_E=weights[f"{prefix}post_attention_layernorm.weight"],
        next_norm_E=weights[following],
    )


def build_decoder(config: ModelConfig, weights: Weights, *, deterministic: bool) -> Decoder:
    """The model of checked `weights` (names and shapes of `weights.weight_shapes`, one dtype).

    deterministic: ask the kernels for rows that do not depend on their neighbours.
    """
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if config.tied_embeddings else weights["lm_head.weight"]
    load = None if config.experts is None else ExpertLoad(config.num_layers, config.experts.num_experts)
    return Decoder(
        embedding=TokenTable(weight_VE=embedding),
        first_norm_E=weights["model.layers.0.input_layernorm.weight"],
        layers=tuple(_layer(config, weights, i, load, deterministic) for i in range(config.num_layers)),
        head=PackedLinear.pack(head, deterministic=deterministic),
        eps=config.rms_norm_eps,
        rope=RopeTable(config.rope),
        expert_load=load,
    )
