"""A model as a Hugging Face directory: configuration, tokenizer files, safetensors in shards.

What lives here: the files' forms. What does not: which model is written (`upcycle`), reading them back
(`hf_config`, `hf_directory`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeConfig, RopeKind
from pdserve.layers.routers import RouterKind
from pdserve.models.config import ARCHITECTURES, ModelConfig
from pdserve.models.hf_config import config_from_hf
from pdserve.models.hf_directory import INDEX
from pdserve.models.hf_experts import ROUTER
from pdserve.tokenizer.bundle import TokenizerBundle


def mixtral_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a Mixtral. Raises ModelError for what that form can not say."""
    experts = config.experts
    if experts is None or any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)):
        raise ModelError("Mixtral's format has experts in all layers, no biases and no norms of heads.")
    values = _common(config, "mixtral", dtype) | {
        "intermediate_size": experts.intermediate_size,
        "sliding_window": _window(config),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }
    if experts.router is not RouterKind.CHOICE:
        router = {"kind": experts.router.value, "capacity_factor": experts.capacity_factor}
        values[ROUTER] = {**router, "seed": experts.seed}
    return values


def dense_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a dense model. Raises ModelError for what its family's form can not say."""
    values = _common(config, config.architecture, dtype)
    windowed = ARCHITECTURES[config.architecture].windowed
    if windowed == "all":
        values["sliding_window"] = _window(config)
    elif windowed == "layers":
        sizes = {size for size in config.windows if size}
        named = ["sliding_attention" if size else "full_attention" for size in config.windows]
        values |= {"use_sliding_window": bool(sizes), "sliding_window": max(sizes, default=None)}
        values["layer_types"] = named
    if config.architecture in ("llama", "qwen3"):
        values["attention_bias"] = config.o_bias
    if config.architecture == "llama":
        values["mlp_bias"] = config.mlp_bias
    ordered = dataclasses.replace(config, end_token_ids=tuple(sorted(config.end_token_ids)))
    if config_from_hf(values) != ordered:
        raise ModelError("The model has settings that its family's config.json can not hold.")
    return values


def _common(config: ModelConfig, model_type: str, dtype: str) -> dict[str, Any]:
    """What all families' files say."""
    return {
        "architectures": [ARCHITECTURES[model_type].hf_class],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _positions(config),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": _rope(config.rope),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.end_token_ids),
    }


def _positions(config: ModelConfig) -> int:
    stretched = config.rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC)
    return config.rope.original_context if stretched else config.max_context


def _window(config: ModelConfig) -> int | None:
    if len(set(config.windows)) > 1:
        raise ModelError("The format has one sliding window for all layers; this model's differ.")
    return config.windows[0] or None


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind is RopeKind.FACTORS:
        raise ModelError(
            "config.json can not hold a GGUF file's RoPE factors; start from the model's original form."
        )
    values: dict[str, Any] = {"rope_type": rope.kind.value, "rope_theta": rope.theta}
    if rope.kind is not RopeKind.DEFAULT:
        values["factor"] = rope.factor
    if rope.kind is RopeKind.LLAMA3:
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind is RopeKind.YARN:
        values |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    if rope.kind in (RopeKind.LLAMA3, RopeKind.YARN):
        values["original_max_position_embeddings"] = rope.original_context
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Indented JSON."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def write_tokenizer(directory: Path, bundle: TokenizerBundle) -> None:
    """The files that `pdserve.tokenizer.from_dir` and transformers read."""
    (directory / "tokenizer.json").write_bytes(bundle.tokenizer_json)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(bundle.special_tokens)}
    write_json(directory / "tokenizer_config.json", {**settings, "add_bos_token": bundle.add_bos})
    if bundle.chat_template is not None:
        (directory / "chat_template.jinja").write_text(bundle.chat_template, encoding="utf-8")
    ends = {"bos_token_id": bundle.bos_token_id, "eos_token_id": list(bundle.end_token_ids)}
    write_json(directory / "generation_config.json", ends)


class ShardWriter:
    """Writes safetensors files of one model, one `add` each, and their index at the end."""

    def __init__(self, directory: Path, num_shards: int) -> None:
        self._directory, self._num_shards = directory, num_shards
        self._weight_map: dict[str, str] = {}
        self._size_bytes = 0

    def add(self, weights: dict[str, torch.Tensor]) -> None:
        """One more file. Tensors may share memory; they are copied."""
        written = len(set(self._weight_map.values())) + 1
        name = f"model-{written:05d}-of-{self._num_shards:05d}.safetensors"
        own = {key: weight.contiguous().clone() for key, weight in weights.items()}
        save_file(own, self._directory / name, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(weights, name)
        self._size_bytes += sum(weight.nbytes for weight in own.values())

    def finish(self) -> int:
        """Writes the index; returns the bytes of all weights."""
        metadata, index = {"total_size": self._size_bytes}, self._directory / INDEX
        write_json(index, {"metadata": metadata, "weight_map": self._weight_map})
        # safetensors makes its files readable by their owner only.
        for name in set(self._weight_map.values()):
            (self._directory / name).chmod(index.stat().st_mode)
        return self._size_bytes
