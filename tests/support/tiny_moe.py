"""Tiny random-weight mixtures of experts made with transformers: architectures and their options.

What lives here: their configurations. What does not: files (`tiny_models`), checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
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

from tests.support.tiny_models import make


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
    "olmoe-clipped": lambda: olmoe(clip_qkv=0.7, norm_topk_prob=True, num_key_value_heads=4),
}
"""Every architecture, with its options between them, by name."""
