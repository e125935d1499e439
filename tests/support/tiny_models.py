"""Tiny random-weight models made with transformers, as directories and as GGUF files.

What lives here: configurations of every architecture and the files that hold them. What does not: checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 288
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def make(config_class: Any, model_class: Any, **fields: Any) -> PreTrainedModel:
    """A model with every parameter random: biases are not zero, norms are not one."""
    config = config_class(**{**_SHAPE, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(len(repr(sorted(fields.items()))))
    model: PreTrainedModel = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(around + 0.18 * torch.randn_like(parameter))
    return model


def llama(**fields: Any) -> PreTrainedModel:
    return make(LlamaConfig, LlamaForCausalLM, **fields)


def mistral(**fields: Any) -> PreTrainedModel:
    return make(MistralConfig, MistralForCausalLM, **fields)


def qwen2(**fields: Any) -> PreTrainedModel:
    return make(Qwen2Config, Qwen2ForCausalLM, **fields)


def qwen3(**fields: Any) -> PreTrainedModel:
    return make(Qwen3Config, Qwen3ForCausalLM, **fields)


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    """The `rope_parameters` of a scaling kind."""
    return {"rope_type": kind, "rope_theta": 10_000.0, **fields}


YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = scaled(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama2-mha": lambda: llama(num_key_value_heads=4),
    "llama-mqa-tied": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama3-scaled": lambda: llama(rope_parameters=LLAMA3),
    "llama-linear": lambda: llama(rope_parameters=scaled("linear", factor=4.0)),
    "llama-dynamic": lambda: llama(rope_parameters=scaled("dynamic", factor=4.0)),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "llama-yarn-mscale": lambda: llama(
        rope_parameters={
            **YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0,
            "truncate": False,
        }
    ),
    "mistral-window": lambda: mistral(sliding_window=23, head_dim=32),
    "mistral-full": lambda: mistral(sliding_window=None),
    "qwen2-tied": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=31, max_window_layers=1),
    "qwen3": lambda: qwen3(head_dim=32),
    "qwen3-yarn-biases": lambda: qwen3(head_dim=16, attention_bias=True, rope_parameters=YARN),
}  # fmt: skip
"""Every architecture, attention shape and RoPE scaling, by name."""


def write_tokenizer(directory: Path) -> None:
    """A tokenizer.json with the right number of tokens; what it means is no concern here."""
    vocab = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """The model as a Hugging Face directory."""
    model.save_pretrained(directory, **options)
    write_tokenizer(directory)
    return directory


GGUF_ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""GGUF's names where they differ from Hugging Face's."""
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


_GGUF_NAMES |= {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def gguf_name(name: str) -> str:
    """A weight's name in GGUF."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.{kind}"


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for q and k of the llama family."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_metadata(writer: GGUFWriter, config: Any) -> None:
    """Keys that every architecture has, and a tokenizer."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def _experts_metadata(writer: GGUFWriter, config: Any) -> None:
    if not hasattr(config, "num_experts_per_tok"):
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)


def gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Weights as llama.cpp's converter splits them: gate and up of the experts apart, the gate a vector."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(weight, 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), np.ascontiguousarray(half)
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("shared_expert_gate.weight"):
            yield name, weight[0]
        else:
            yield name, weight


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: np.ndarray | None = None,
    one_by_one: bool = False,
) -> Path:
    """The model as one GGUF file, matrices stored as `kind`. one_by_one: experts apart, as in older files."""
    config: Any = model.config
    writer = GGUFWriter(path, GGUF_ARCHITECTURES.get(config.model_type, config.model_type))
    write_metadata(writer, config)
    _experts_metadata(writer, config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, weight in gguf_tensors(model):
        part = name.split(".")[-2]
        if config.model_type in ("llama", "mixtral") and part in heads:
            weight = _permuted(weight, heads[part])
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
        elif one_by_one and weight.ndim == 3:
            for expert, one in enumerate(weight):
                single = gguf_name(name).replace("_exps.", f".{expert}.")
                writer.add_tensor(single, np.ascontiguousarray(one))
        else:
            writer.add_tensor(gguf_name(name), quants.quantize(weight, kind), raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
