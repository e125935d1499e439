"""What a DeepSeek-V2 or -V3 config.json says beyond other families: latent attention and grouped routing.

What lives here: reading and checking those fields. What does not: the rest of the configuration
(`hf_config`), other families' experts (`hf_experts`).
"""

from __future__ import annotations

from pdserve.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    Architecture,
    ExpertsConfig,
    LatentConfig,
)
from pdserve.models.fields import Fields

_V3 = "deepseek_v3"


def latent_from_hf(fields: Fields, arch: Architecture, head_scale: float) -> LatentConfig | None:
    """None for families with plain attention. head_scale: RoPE scaling's factor on scores."""
    if not arch.latent:
        return None
    rank = fields.raw("q_lora_rank") if fields.present("q_lora_rank") else 1536
    nope, rope = fields.integer("qk_nope_head_dim", 1, 4096, 128), rope_dim(fields)
    kv_rank = fields.integer("kv_lora_rank", 1, MAX_WIDTH, 512)
    if (kv_rank + rope) % 2:
        fields.refuse("kv_lora_rank", "must make an even number with qk_rope_head_dim")
    return LatentConfig(
        q_rank=None if rank is None else fields.integer("q_lora_rank", 1, MAX_WIDTH, 1536),
        kv_rank=kv_rank,
        nope_dim=nope,
        rope_dim=rope,
        v_dim=fields.integer("v_head_dim", 1, 4096, 128),
        interleaved=arch.name != _V3 or fields.flag("rope_interleave", True),
        scale=(nope + rope) ** -0.5 * head_scale,
    )


def rope_dim(fields: Fields) -> int:
    """Elements of a head that turn."""
    return fields.integer("qk_rope_head_dim", 2, 4096, 64)


def experts_from_deepseek(fields: Fields, arch: Architecture, num_layers: int) -> ExpertsConfig | None:
    """None where no layer has experts. Raises ModelError for values that do not fit together."""
    v3 = arch.name == _V3
    first = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, 3 if v3 else 0)
    layers = tuple(i >= first for i in range(num_layers))
    if fields.integer("moe_layer_freq", 1, MAX_LAYERS, 1) != 1:
        fields.refuse("moe_layer_freq", "must be 1")
    if not any(layers):
        return None
    num_experts = fields.integer("n_routed_experts", 1, MAX_EXPERTS, 256 if v3 else 64)
    top_k = fields.integer("num_experts_per_tok", 1, num_experts, 8 if v3 else None)
    groups, top_groups = _groups(fields, v3, num_experts, top_k)
    width = fields.integer("moe_intermediate_size", 1, MAX_WIDTH, 2048 if v3 else 1407)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        normalise=_normalise(fields, v3),
        layers=layers,
        shared_size=width * fields.integer("n_shared_experts", 0, 64, 1 if v3 else 2),
        shared_gate=False,
        sigmoid=v3,
        biased=v3,
        groups=groups,
        top_groups=top_groups,
        scale=fields.number("routed_scaling_factor", 0, 1e6, 2.5 if v3 else 1.0),
    )


def _normalise(fields: Fields, v3: bool) -> bool:
    wanted = fields.flag("norm_topk_prob", v3)
    if wanted and not v3:
        fields.refuse("norm_topk_prob", "must be false in a model of type deepseek_v2")
    return wanted


def _groups(fields: Fields, v3: bool, num_experts: int, top_k: int) -> tuple[int, int]:
    """(groups, groups whose experts count)."""
    methods = {"noaux_tc": v3, "greedy": False, "group_limited_greedy": True}
    method = fields.text("topk_method", "noaux_tc" if v3 else "greedy")
    if method not in methods or (method == "noaux_tc") != v3:
        fields.refuse("topk_method", "is not one that this family has")
    if not methods[method]:
        return 1, 1
    groups = fields.integer("n_group", 1, num_experts, 8 if v3 else None)
    top = fields.integer("topk_group", 1, groups, 4 if v3 else None)
    if num_experts % groups or top_k > top * (num_experts // groups):
        fields.refuse("n_group", "must divide the experts and leave enough of them")
    return groups, top
