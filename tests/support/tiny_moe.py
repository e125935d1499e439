"""Tiny random-weight mixtures of experts made with transformers: architectures and their options.

What lives here: their configurations. What does not: files (`tiny_models`), checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.tiny_models import YARN, make


def mixtral(**fields: Any) -> PreTrainedModel:
    return make(MixtralConfig, MixtralForCausalLM, num_local_experts=6, num_experts_per_tok=2, **fields)


def qwen2_moe(**fields: Any) -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
    return make(Qwen2MoeConfig, Qwen2MoeForCausalLM, num_experts=6, num_experts_per_tok=3, **sizes, **fields)


def qwen3_moe(**fields: Any) -> PreTrainedModel:
    few = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 32}
    return make(Qwen3MoeConfig, Qwen3MoeForCausalLM, **few, **fields)


def olmoe(**fields: Any) -> PreTrainedModel:
    return make(OlmoeConfig, OlmoeForCausalLM, num_experts=6, num_experts_per_tok=2, **fields)


_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
}


def deepseek_v2(**fields: Any) -> PreTrainedModel:
    defaults = {**_DEEPSEEK, "n_routed_experts": 8, "n_shared_experts": 2, "q_lora_rank": None}
    return make(DeepseekV2Config, DeepseekV2ForCausalLM, **{**defaults, **fields})


def deepseek_v3(**fields: Any) -> PreTrainedModel:
    groups = {"n_group": 4, "topk_group": 2, "q_lora_rank": 24, "num_mtp_layers": 0}
    defaults = {**_DEEPSEEK, "n_routed_experts": 8, "n_shared_experts": 1, **groups}
    model = make(DeepseekV3Config, DeepseekV3ForCausalLM, **{**defaults, **fields})
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.3 * torch.randn_like(bias))
    return model


VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: mixtral(head_dim=32),
    "mixtral-window-tied": lambda: mixtral(sliding_window=23, tie_word_embeddings=True),
    "qwen2moe": lambda: qwen2_moe(),
    "qwen2moe-normalised": lambda: qwen2_moe(norm_topk_prob=True, mlp_only_layers=[0], qkv_bias=False),
    "qwen2moe-windows": lambda: qwen2_moe(use_sliding_window=True, sliding_window=31, max_window_layers=2),
    "qwen3moe": lambda: qwen3_moe(),
    "qwen3moe-sparse-step": lambda: qwen3_moe(
        norm_topk_prob=True, decoder_sparse_step=2, attention_bias=True
    ),
    "olmoe": lambda: olmoe(),
    "deepseek2-lite": lambda: deepseek_v2(),
    "deepseek2-groups-yarn": lambda: deepseek_v2(
        topk_method="group_limited_greedy", n_group=4, topk_group=2, q_lora_rank=24, attention_bias=True,
        routed_scaling_factor=3.0, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek3": lambda: deepseek_v3(),
    "deepseek3-halves-yarn": lambda: deepseek_v3(
        rope_interleave=False, norm_topk_prob=False, attention_bias=True,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "olmoe-clipped": lambda: olmoe(clip_qkv=0.7, norm_topk_prob=True, num_key_value_heads=4),
}  # fmt: skip
"""Every architecture, with its options between them, by name."""
