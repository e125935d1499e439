"""What GGUF metadata of architecture "deepseek2" (DeepSeek-V2 and -V3, llama.cpp's converter) says.

What lives here: latent attention and routing, in both forms of the file: kv_b whole, with key_length of a
head, and kv_b split, with key_length of a latent row and key_length_mla of a head. What does not: other keys
(`gguf_config`), tensors (`gguf_weights`).
"""

from __future__ import annotations

import math

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeConfig, RopeKind
from pdserve.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, ExpertsConfig, LatentConfig
from pdserve.models.fields import Fields

SIGMOID, SOFTMAX = 2, 1
"""Values of expert_gating_func."""


def has_sigmoid(fields: Fields) -> bool:
    """Whether the model is a DeepSeek-V3, by its scores."""
    return fields.integer("expert_gating_func", SOFTMAX, SIGMOID, SOFTMAX) == SIGMOID


def rope_dim(fields: Fields) -> int:
    """Elements of a head that turn."""
    return fields.integer("rope.dimension_count", 2, 4096)


def latent_from_gguf(fields: Fields, rope: RopeConfig) -> LatentConfig:
    """Raises ModelError for values that do not fit together."""
    form = "_mla" if fields.has("attention.key_length_mla") else ""
    turning = rope_dim(fields)
    key = fields.integer(f"attention.key_length{form}", turning + 1, 8192)
    rank = fields.integer("attention.kv_lora_rank", 1, MAX_WIDTH)
    if (rank + turning) % 2:
        raise ModelError("The GGUF file can not be used: its latent rows have an odd number of elements.")
    q_rank = "attention.q_lora_rank"
    return LatentConfig(
        q_rank=fields.integer(q_rank, 1, MAX_WIDTH) if fields.has(q_rank) else None,
        kv_rank=rank,
        nope_dim=key - turning,
        rope_dim=turning,
        v_dim=fields.integer(f"attention.value_length{form}", 1, 4096),
        interleaved=True,
        scale=key**-0.5 * _score_factor(fields, rope),
    )


def _score_factor(fields: Fields, rope: RopeConfig) -> float:
    """YaRN's term squared; the multiplier is a tenth of Hugging Face's mscale_all_dim."""
    multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0, 10, 0.0)
    if rope.kind is not RopeKind.YARN or rope.factor <= 1:
        return 1.0
    return (1.0 + multiplier * math.log(rope.factor)) ** 2


def experts_from_deepseek2(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """None where no layer has experts. Raises ModelError for values that do not fit together."""
    first = fields.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
    if first >= num_layers:
        return None
    num_experts = fields.integer("expert_count", 1, MAX_EXPERTS)
    top_k = fields.integer("expert_used_count", 1, num_experts)
    groups = fields.integer("expert_group_count", 1, num_experts, 1)
    top_groups = fields.integer("expert_group_used_count", 1, groups, groups)
    if num_experts % groups or top_k > top_groups * (num_experts // groups):
        fields.refuse("expert_group_count", "must divide the experts and leave enough of them")
    width, sigmoid = fields.integer("expert_feed_forward_length", 1, MAX_WIDTH), has_sigmoid(fields)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        normalise=fields.flag("expert_weights_norm", False),
        layers=tuple(i >= first for i in range(num_layers)),
        shared_size=width * fields.integer("expert_shared_count", 0, 64, 0),
        shared_gate=False,
        sigmoid=sigmoid,
        biased=sigmoid,
        groups=groups,
        top_groups=top_groups,
        scale=fields.number("expert_weights_scale", 0, 1e6, 1.0),
    )
