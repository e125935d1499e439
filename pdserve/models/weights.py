"""Which weights a model has: names (Hugging Face's), shapes, and the check of what a file brought.

What lives here: the one list that both loaders are held to. What does not: reading files.
Shapes: V vocabulary, N hidden, F intermediate, H heads, K KV heads, D head dim; linears are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ModelConfig


def _layer_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    q, kv, n, f = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    linears = {
        "self_attn.q_proj": (q, n, c.qkv_bias),
        "self_attn.k_proj": (kv, n, c.qkv_bias),
        "self_attn.v_proj": (kv, n, c.qkv_bias),
        "self_attn.o_proj": (n, q, c.o_bias),
        "mlp.gate_proj": (f, n, c.mlp_bias),
        "mlp.up_proj": (f, n, c.mlp_bias),
        "mlp.down_proj": (n, f, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (n,),
        "post_attention_layernorm.weight": (n,),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    return shapes


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def needless(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may carry this tensor although it is not used: it repeats what is known."""
    tied_head = config.tied_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def check_names(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Holds a file's tensors to the model's list. Raises ModelError for missing, extra, misshapen ones."""
    shapes = weight_shapes(config)
    missing = sorted(set(shapes) - set(found))
    if missing:
        raise ModelError(f"The model's files lack {len(missing)} of its weights, {missing[0]} among them.")
    extra = sorted(name for name in set(found) - set(shapes) if not needless(name, config))
    if extra:
        raise ModelError(
            f"The model's files hold {len(extra)} weights that its configuration does not know, "
            f"{extra[0][:80]} among them."
        )
    for name, shape in shapes.items():
        if found[name] != shape:
            raise ModelError(f"The weight {name} has another shape than the configuration says.")


def check_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ModelError if a weight holds NaN or infinity: its file is damaged."""
    for name, weight in weights:
        if not bool(torch.isfinite(weight.sum(dtype=torch.float32))) and not bool(weight.isfinite().all()):
            raise ModelError(f"The weight {name} holds values that are not numbers; the file is damaged.")
