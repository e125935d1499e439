"""From named weights to a runnable decoder: fusing q, k, v and gate, up, and packing for the kernels.

What lives here: which weight goes where. What does not: reading files (`loader`), running (`decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdserve.kernels.embedding import TokenTable
from pdserve.kernels.linear import PackedLinear
from pdserve.layers.attention import Attention
from pdserve.layers.mlp import GatedMLP
from pdserve.layers.rope import RopeTable
from pdserve.models.config import ModelConfig
from pdserve.models.decoder import Decoder, DecoderLayer

Weights = Mapping[str, torch.Tensor]


def _fused(weights: Weights, prefix: str, names: tuple[str, ...], deterministic: bool) -> PackedLinear:
    """One packed linear whose outputs are those of `names`, one after the other."""
    weight = torch.cat([weights[f"{prefix}{n}.weight"] for n in names])
    biased = f"{prefix}{names[0]}.bias" in weights
    bias = torch.cat([weights[f"{prefix}{n}.bias"] for n in names]) if biased else None
    return PackedLinear.pack(weight, bias, deterministic=deterministic)


def _attention(config: ModelConfig, weights: Weights, layer: int, deterministic: bool) -> Attention:
    prefix = f"model.layers.{layer}.self_attn."
    return Attention(
        layer=layer,
        qkv=_fused(weights, prefix, ("q_proj", "k_proj", "v_proj"), deterministic),
        out=_fused(weights, prefix, ("o_proj",), deterministic),
        num_heads=config.num_heads,
        scale=config.head_dim**-0.5,
        window=config.windows[layer],
        eps=config.rms_norm_eps,
        q_norm_D=weights.get(f"{prefix}q_norm.weight"),
        k_norm_D=weights.get(f"{prefix}k_norm.weight"),
    )


def _layer(config: ModelConfig, weights: Weights, layer: int, deterministic: bool) -> DecoderLayer:
    prefix = f"model.layers.{layer}."
    last = layer == config.num_layers - 1
    following = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
    return DecoderLayer(
        attention=_attention(config, weights, layer, deterministic),
        mlp=GatedMLP(
            gate_up=_fused(weights, f"{prefix}mlp.", ("gate_proj", "up_proj"), deterministic),
            down=_fused(weights, f"{prefix}mlp.", ("down_proj",), deterministic),
        ),
        mlp_norm_E=weights[f"{prefix}post_attention_layernorm.weight"],
        next_norm_E=weights[following],
    )


def build_decoder(config: ModelConfig, weights: Weights, *, deterministic: bool) -> Decoder:
    """The model of checked `weights` (names and shapes of `weights.weight_shapes`, one dtype).

    deterministic: ask the kernels for rows that do not depend on their neighbours.
    """
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if config.tied_embeddings else weights["lm_head.weight"]
    return Decoder(
        embedding=TokenTable(weight_VE=embedding),
        first_norm_E=weights["model.layers.0.input_layernorm.weight"],
        layers=tuple(_layer(config, weights, i, deterministic) for i in range(config.num_layers)),
        head=PackedLinear.pack(head, deterministic=deterministic),
        eps=config.rms_norm_eps,
        rope=RopeTable(config.rope),
    )
