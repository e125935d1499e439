"""ModelConfig from GGUF metadata (ggml's docs/gguf.md and llama.cpp's converter).

What lives here: reading and checking keys. What does not: the file (`gguf_file`), weights (`gguf_weights`).
Llama, Mistral and Mixtral share GGUF's architecture "llama", which has no sliding window.
"""

from __future__ import annotations

from typing import Any

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeConfig, RopeKind
from pdserve.models.config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Architecture,
    ExpertsConfig,
    ModelConfig,
    architecture,
)
from pdserve.models.fields import Fields
from pdserve.models.gguf_deepseek import experts_from_deepseek2, has_sigmoid, latent_from_gguf, rope_dim
from pdserve.models.hf_config import yarn_attention_factor

_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds per-frequency divisors (llama.cpp's form of llama3 scaling)."""


def config_from_gguf(
    metadata: dict[str, Any],
    tensor_names: frozenset[str],
    freq_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """The model that the metadata describes.

    tensor_names: the file's tensors (a missing output.weight means tied embeddings; biases show there).
    freq_factors: values of `rope_freqs.weight`, if the file has it.
    Raises ModelError for unsupported or inconsistent values.
    """
    name = Fields(metadata, "The GGUF metadata").text("general.architecture")
    fields = Fields(metadata, "The GGUF metadata", f"{name}.")
    arch = _architecture(name, fields)
    _refuse_unsupported(metadata, fields)
    hidden = fields.integer("embedding_length", 1, MAX_WIDTH)
    heads = fields.integer("attention.head_count", 1, MAX_HEADS)
    layers = fields.integer("block_count", 1, MAX_LAYERS)
    head_dim = rope_dim(fields) if arch.latent else _head_dim(fields, hidden, heads)
    positions = fields.integer("context_length", 1, MAX_CONTEXT)
    rope = _rope(fields, head_dim, positions, freq_factors)
    latent = latent_from_gguf(fields, rope) if arch.latent else None
    tokenizer = Fields(metadata, "The GGUF metadata", "tokenizer.ggml.")
    bos = tokenizer.ids("bos_token_id")
    return ModelConfig(
        architecture=arch.name,
        vocab_size=_vocab_size(fields, metadata),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", 1, MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1 if latent else fields.integer("attention.head_count_kv", 1, MAX_HEADS, heads),
        head_dim=(latent.kv_rank + latent.rope_dim) // 2 if latent else head_dim,
        max_context=positions,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0, 1),
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias=arch.qkv_bias or "blk.0.attn_q.bias" in tensor_names,
        o_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm=arch.qk_norm,
        windows=(0,) * layers,
        rope=rope,
        bos_token_id=bos[0] if bos else None,
        end_token_ids=tokenizer.ids("eos_token_id"),
        qk_norm_whole=arch.qk_norm_whole,
        clip_qkv=fields.number("attention.clamp_kqv", 0, 1e6) if fields.has("attention.clamp_kqv") else None,
        experts=_experts(fields, arch, layers, tensor_names),
        latent=latent,
    )


def _architecture(name: str, fields: Fields) -> Architecture:
    """Hugging Face's name of GGUF's architecture."""
    experts = fields.integer("expert_count", 0, MAX_EXPERTS, 0)
    if name == "llama" and experts:
        return architecture("mixtral")
    if name == "deepseek2":
        return architecture("deepseek_v3" if has_sigmoid(fields) else "deepseek_v2")
    if name in ("deepseek_v2", "deepseek_v3"):
        raise ModelError(f"The GGUF file can not be used: {name} is not a name that GGUF has.")
    arch = architecture(_NAMES.get(name, name))
    if experts and arch.experts is None:
        raise ModelError(f"Mixture-of-experts models of architecture {name[:40]!r} are not supported.")
    return arch


def _experts(
    fields: Fields, arch: Architecture, num_layers: int, tensor_names: frozenset[str]
) -> ExpertsConfig | None:
    """A layer has experts if its router is there; llama.cpp's loader has these defaults for widths."""
    if arch.latent:
        return experts_from_deepseek2(fields, num_layers)
    if arch.experts is None:
        return None
    layers = tuple(f"blk.{i}.ffn_gate_inp.weight" in tensor_names for i in range(num_layers))
    dense = fields.integer("feed_forward_length", 1, MAX_WIDTH)
    num_experts = fields.integer("expert_count", 1, MAX_EXPERTS)
    top_k = fields.integer("expert_used_count", 1, num_experts)
    if not any(layers):
        fields.refuse("expert_count", "asks for experts that no layer has")
    plain = arch.experts.width_field == "intermediate_size"
    width = dense if plain else max(1, dense // top_k)
    normalised = arch.name in ("mixtral", "qwen3_moe")
    shared = fields.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH, dense)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("expert_feed_forward_length", 1, MAX_WIDTH, width),
        normalise=fields.flag("expert_weights_norm", normalised),
        layers=layers,
        shared_size=shared if arch.experts.shared_size else 0,
    )


def _refuse_unsupported(metadata: dict[str, Any], fields: Fields) -> None:
    if Fields(metadata, "The GGUF metadata").integer("split.count", 0, 1 << 16, 0) > 1:
        raise ModelError("The GGUF file is one part of several; merge them into one file first.")
    if fields.integer("attention.sliding_window", 0, MAX_CONTEXT, 0):
        fields.refuse("attention.sliding_window", "is not supported in a GGUF file")


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    head_dim = fields.integer("attention.key_length", 1, 4096, max(1, hidden // heads))
    if fields.integer("attention.value_length", 1, 4096, head_dim) != head_dim:
        fields.refuse("attention.value_length", "must equal attention.key_length")
    if fields.integer("rope.dimension_count", 1, 4096, head_dim) != head_dim:
        fields.refuse("rope.dimension_count", "must equal the head dimension")
    return head_dim


def _vocab_size(fields: Fields, metadata: dict[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) and tokens else None
    return fields.integer("vocab_size", 1, MAX_VOCAB, listed)


def _rope(fields: Fields, head_dim: int, positions: int, freq_factors: tuple[float, ...]) -> RopeConfig:
    theta = fields.number("rope.freq_base", 1.0001, 1e12, 10_000.0)
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    if freq_factors:
        if len(freq_factors) != head_dim // 2 or not all(1e-6 < f < 1e6 for f in freq_factors):
            raise ModelError("The GGUF file can not be used: its RoPE factors do not fit the head dimension.")
        return RopeConfig(
            kind=RopeKind.FACTORS,
            theta=theta,
            rotary_dim=head_dim,
            original_context=positions,
            freq_factors=freq_factors,
        )
    if kind == "none":
        return RopeConfig(theta=theta, rotary_dim=head_dim, original_context=positions)
    if kind not in ("linear", "yarn"):
        fields.refuse("rope.scaling.type", "must be none, linear or yarn")
    return _scaled(fields, kind, theta, head_dim, positions)


def _scaled(fields: Fields, kind: str, theta: float, head_dim: int, positions: int) -> RopeConfig:
    older = fields.number("rope.scale_linear", 1, 1e6, 1.0)
    factor = fields.number("rope.scaling.factor", 1, 1e6, older)
    original = fields.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, positions)
    attention = 1.0
    if kind == "yarn":
        extra = fields.number("rope.scaling.attn_factor", 1e-6, 100, 1.0)
        # DeepSeek's factor lies on the scores alone: its mscale and mscale_all_dim cancel out here.
        on_scores = fields.has("rope.scaling.yarn_log_multiplier")
        attention = extra * (1.0 if on_scores else yarn_attention_factor(factor))
    return RopeConfig(
        kind=RopeKind(kind),
        theta=theta,
        rotary_dim=head_dim,
        original_context=original,
        factor=factor,
        attention_factor=attention,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
    )
