"""From named weights to a runnable decoder: fusing q, k, v and gate, up, and packing for the kernels.

What lives here: which weight goes where. What does not: reading files (`loader`), running (`decoder`).
"""

from __future__ import annotations

from pdserve.kernels.embedding import TokenTable
from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.kernels.linear import Linear
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
from pdserve.models.precision import ExactPacker, Packer, Weights
from pdserve.models.weights import BIAS


def _fused(pack: Packer, weights: Weights, prefix: str, names: tuple[str, ...]) -> Linear:
    return pack(weights, [f"{prefix}{name}" for name in names])


def _attention(config: ModelConfig, weights: Weights, layer: int, pack: Packer) -> Attention:
    prefix = f"model.layers.{layer}.self_attn."
    q_norm, k_norm = weights.get(f"{prefix}q_norm.weight"), weights.get(f"{prefix}k_norm.weight")
    return Attention(
        layer=layer,
        qkv=_fused(pack, weights, prefix, ("q_proj", "k_proj", "v_proj")),
        out=_fused(pack, weights, prefix, ("o_proj",)),
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
    config: ModelConfig, weights: Weights, layer: int, pack: Packer, deterministic: bool
) -> Attention | LatentAttention:
    if config.latent is not None:
        return build_latent(config, config.latent, weights, layer, deterministic)
    return _attention(config, weights, layer, pack)


def _gated(pack: Packer, weights: Weights, prefix: str) -> GatedMLP:
    return GatedMLP(
        gate_up=_fused(pack, weights, prefix, ("gate_proj", "up_proj")),
        down=_fused(pack, weights, prefix, ("down_proj",)),
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
    pack = ExactPacker(deterministic=deterministic)
    prefix = f"model.layers.{layer}.mlp."
    shared = None
    if x.shared_size:
        shared = SharedExpert(
            mlp=_gated(pack, weights, f"{prefix}shared_expert."),
            gate=_fused(pack, weights, prefix, ("shared_expert_gate",)) if x.shared_gate else None,
        )
    return MoE(
        layer=layer,
        gate=_fused(pack, weights, prefix, ("gate",)),
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
    config: ModelConfig,
    weights: Weights,
    layer: int,
    load: ExpertLoad | None,
    pack: Packer,
    deterministic: bool,
) -> DecoderLayer:
    prefix = f"model.layers.{layer}."
    last = layer == config.num_layers - 1
    following = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
    mlp: FeedForward
    if config.experts is not None and load is not None and config.has_experts(layer):
        mlp = _moe(config.experts, weights, layer, load, deterministic)
    else:
        mlp = _gated(pack, weights, f"{prefix}mlp.")
    return DecoderLayer(
        attention=_any_attention(config, weights, layer, pack, deterministic),
        mlp=mlp,
        mlp_norm_E=weights[f"{prefix}post_attention_layernorm.weight"],
        next_norm_E=weights[following],
    )


def build_decoder(
    config: ModelConfig, weights: Weights, *, deterministic: bool, pack: Packer | None = None
) -> Decoder:
    """The model of checked `weights` (names and shapes of `weights.weight_shapes`, one dtype).

    deterministic: ask the kernels for rows that do not depend on their neighbours. pack: how the linears of
    dense layers and the head are held; None: exactly.
    """
    pack = pack or ExactPacker(deterministic=deterministic)
    embedding = weights["model.embed_tokens.weight"]
    named = {"lm_head.weight": embedding, **weights} if config.tied_embeddings else weights
    load = None if config.experts is None else ExpertLoad(config.num_layers, config.experts.num_experts)
    return Decoder(
        embedding=TokenTable(weight_VE=embedding),
        first_norm_E=weights["model.layers.0.input_layernorm.weight"],
        layers=tuple(_layer(config, weights, i, load, pack, deterministic) for i in range(config.num_layers)),
        head=pack(named, ["lm_head"]),
        eps=config.rms_norm_eps,
        rope=RopeTable(config.rope),
        expert_load=load,
    )
