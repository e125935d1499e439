"""DeepSeek models as GGUF files ("deepseek2"), in llama.cpp's older and newer form. No checks here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType
from transformers import PreTrainedModel

from tests.support.tiny_models import finish, gguf_name, gguf_tensors, write_metadata


def _metadata(writer: GGUFWriter, config: Any, split: bool) -> None:
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    if split:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(head)
        writer.add_value_length(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _experts(writer: GGUFWriter, config: Any) -> None:
    sigmoid = config.model_type == "deepseek_v3"
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(sigmoid)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if sigmoid else ExpertGatingFuncType.SOFTMAX)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _tensors(model: PreTrainedModel, split: bool) -> Iterator[tuple[str, np.ndarray]]:
    config: Any = model.config
    for name, weight in gguf_tensors(model):
        if split and "kv_b_proj" in name:
            heads = weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield gguf_name(name.replace("kv_b_proj", "k_b_proj")), k.swapaxes(1, 2)
            yield gguf_name(name.replace("kv_b_proj", "v_b_proj")), v
        else:
            yield gguf_name(name), weight
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy()


def save(model: PreTrainedModel, path: Path, *, split: bool) -> Path:
    """One file in float32. split: kv_b in two, as newer converters write it."""
    writer = GGUFWriter(path, "deepseek2")
    write_metadata(writer, model.config)
    _metadata(writer, model.config, split)
    _experts(writer, model.config)
    for name, weight in _tensors(model, split):
        writer.add_tensor(name, np.ascontiguousarray(weight))
    finish(writer)
    return path
