"""ModelConfig from a Hugging Face config.json, old (`rope_scaling`) and new (`rope_parameters`) forms.

What lives here: reading and checking the fields. What does not: files (`hf_directory`), weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.layers.rope import RopeConfig, RopeKind
from pdserve.models.config import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Architecture,
    ModelConfig,
    architecture,
)
from pdserve.models.fields import Fields
from pdserve.models.hf_deepseek import experts_from_deepseek, latent_from_hf, rope_dim
from pdserve.models.hf_experts import experts_from_hf

_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
"""Families whose config.json may ask for biases of q, k, v and o."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    head_dim: int
    positions: int


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes. Raises ModelError for unsupported or inconsistent values."""
    fields = Fields(values, "config.json")
    arch = architecture(fields.text("model_type"))
    _refuse_unsupported(fields, arch)
    sizes = _sizes(fields, arch)
    rope = _rope(fields, sizes, arch)
    attention_bias = arch.name in _ATTENTION_BIAS and fields.flag("attention_bias", False)
    bos = fields.ids("bos_token_id")
    latent = latent_from_hf(fields, arch, _score_factor(fields, rope))
    experts = experts_from_deepseek if latent else experts_from_hf
    return ModelConfig(
        architecture=arch.name,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=sizes.hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=1 if latent else _num_kv_heads(fields, arch, sizes.heads),
        head_dim=(latent.kv_rank + latent.rope_dim) // 2 if latent else sizes.head_dim,
        max_context=_max_context(rope, sizes.positions),
        rms_norm_eps=fields.number("rms_norm_eps", 0, 1, arch.rms_norm_eps),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=(arch.qkv_bias and fields.flag("qkv_bias", True)) or attention_bias,
        o_bias=attention_bias,
        mlp_bias=arch.name == "llama" and fields.flag("mlp_bias", False),
        qk_norm=arch.qk_norm,
        windows=_windows(fields, arch, sizes.layers),
        rope=rope,
        bos_token_id=bos[0] if bos else None,
        end_token_ids=tuple(sorted(set(fields.ids("eos_token_id")))),
        qk_norm_whole=arch.qk_norm_whole,
        clip_qkv=fields.number("clip_qkv", 0, 1e6) if fields.has("clip_qkv") else None,
        experts=experts(fields, arch, sizes.layers),
        latent=latent,
    )


def _refuse_unsupported(fields: Fields, arch: Architecture) -> None:
    """Things that would change the computation and that we do not build."""
    listed = fields.raw("architectures")
    if listed is not None and (not isinstance(listed, list) or arch.hf_class not in listed):
        fields.refuse("architectures", f"must name {arch.hf_class}")
    if fields.text("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", "must be silu")
    if arch.latent and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "must be false")


def _sizes(fields: Fields, arch: Architecture) -> _Sizes:
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    derived = arch.head_dim or max(1, hidden // heads)
    return _Sizes(
        layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        head_dim=rope_dim(fields) if arch.latent else fields.integer("head_dim", 1, 4096, derived),
        positions=fields.integer("max_position_embeddings", 1, MAX_CONTEXT, arch.max_context),
    )


def _num_kv_heads(fields: Fields, arch: Architecture, heads: int) -> int:
    """An absent count is the family's default, null means as many as query heads."""
    absent = heads if fields.present("num_key_value_heads") else arch.num_kv_heads or heads
    return fields.integer("num_key_value_heads", 1, MAX_HEADS, absent)


def _windows(fields: Fields, arch: Architecture, num_layers: int) -> tuple[int, ...]:
    """Sliding windows by layer; an absent sliding_window has the family's default, null means none."""
    used = arch.windowed == "all" or (arch.windowed != "none" and fields.flag("use_sliding_window", False))
    window = _window(fields, arch) if used else 0
    if arch.windowed in ("all", "switched") or not used:
        return (window,) * num_layers
    types = fields.raw("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
        if arch.windowed == "alternate":
            return tuple(window if i < first and i % 2 == 0 else 0 for i in range(num_layers))
        return tuple(window if i >= first else 0 for i in range(num_layers))
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
        fields.refuse("layer_types", "must name sliding_attention or full_attention for each layer")
    return tuple(known[t] for t in types)


def _window(fields: Fields, arch: Architecture) -> int:
    absent = not fields.present("sliding_window") and arch.sliding_window is not None
    if fields.has("sliding_window") or absent:
        return fields.integer("sliding_window", 1, MAX_CONTEXT, arch.sliding_window)
    return 0


def _rope(fields: Fields, sizes: _Sizes, arch: Architecture) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    scaling = fields.mapping(name)
    if scaling.nested():
        fields.refuse(name, "must be the same for all layers")
    theta = scaling if scaling.has("rope_theta") else fields
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _SCALINGS:
        scaling.refuse("rope_type", f"must be one of {', '.join(_SCALINGS)}")
    for holder in (fields, scaling):
        if holder.number("partial_rotary_factor", 0, 1, 1.0) != 1.0:
            holder.refuse("partial_rotary_factor", "must be 1")
    return RopeConfig(
        kind=RopeKind(kind),
        theta=theta.number("rope_theta", 1.0001, 1e12, arch.rope_theta),
        rotary_dim=sizes.head_dim,
        **_SCALINGS[kind](fields, scaling, sizes),
    )


def _original(fields: Fields, scaling: Fields, sizes: _Sizes) -> int:
    holder = fields if fields.has("original_max_position_embeddings") else scaling
    return holder.integer("original_max_position_embeddings", 1, MAX_CONTEXT, sizes.positions)


def _default(fields: Fields, scaling: Fields, sizes: _Sizes) -> dict[str, Any]:
    return {"original_context": sizes.positions}


def _stretched(fields: Fields, scaling: Fields, sizes: _Sizes) -> dict[str, Any]:
    return {"original_context": sizes.positions, "factor": scaling.number("factor", 1, 1e6)}


def _llama3(fields: Fields, scaling: Fields, sizes: _Sizes) -> dict[str, Any]:
    low = scaling.number("low_freq_factor", 1e-6, 1e6)
    high = scaling.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        scaling.refuse("high_freq_factor", "must be greater than low_freq_factor")
    return {
        "original_context": _original(fields, scaling, sizes),
        "factor": scaling.number("factor", 1, 1e6),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _score_factor(fields: Fields, rope: RopeConfig) -> float:
    """DeepSeek's factor on scores: YaRN's term for mscale_all_dim, squared."""
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    scale = fields.mapping(name).number("mscale_all_dim", 0, 100, 0.0)
    if rope.kind is RopeKind.DEFAULT or not scale or rope.factor <= 1:
        return 1.0
    return (0.1 * scale * math.log(rope.factor) + 1.0) ** 2


def yarn_attention_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's factor on cosines and sines: 0.1 ln(factor) + 1, or the ratio of two such terms."""

    def term(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def _yarn(fields: Fields, scaling: Fields, sizes: _Sizes) -> dict[str, Any]:
    original = _original(fields, scaling, sizes)
    factor = scaling.number("factor", 1, 1e6, max(1.0, sizes.positions / original))
    mscale = scaling.number("mscale", 0, 100, 0.0)
    mscale_all_dim = scaling.number("mscale_all_dim", 0, 100, 0.0)
    inferred = yarn_attention_factor(factor, mscale, mscale_all_dim)
    fast = scaling.number("beta_fast", 0, 1e6, 32.0) or 32.0
    slow = scaling.number("beta_slow", 0, 1e6, 1.0) or 1.0
    if fast < slow:
        scaling.refuse("beta_fast", "must not be less than beta_slow")
    return {
        "original_context": original,
        "factor": factor,
        "attention_factor": scaling.number("attention_factor", 0, 100, inferred),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": scaling.flag("truncate", True),
    }


_SCALINGS = {
    "default": _default,
    "linear": _stretched,
    "dynamic": _stretched,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _max_context(rope: RopeConfig, positions: int) -> int:
    """Tokens the model can take: a scaling that stretches the trained length counts, others do not."""
    if rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return min(int(positions * rope.factor), MAX_CONTEXT)
    if rope.kind is RopeKind.YARN:
        return min(max(positions, int(rope.original_context * rope.factor)), MAX_CONTEXT)
    return positions
