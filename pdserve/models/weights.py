"""Which weights a model has: names (Hugging Face's), shapes, and the check of what a file brought.

What lives here: the one list that both loaders are held to. What does not: reading files.
Shapes: V vocabulary, N hidden, F intermediate, H heads, K KV heads, D head dim; linears are [out, in].
Experts of a layer are one weight [experts, out, in], gate's rows before up's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ExpertsConfig, LatentConfig, ModelConfig
from pdserve.models.stacked import ExpertPart

BIAS = "e_score_correction_bias"
HEAD = "lm_head.weight"
_Linears = dict[str, tuple[int, int, bool]]


def _attention_linears(c: ModelConfig) -> _Linears:
    q, kv, n = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    return {
        "self_attn.q_proj": (q, n, c.qkv_bias),
        "self_attn.k_proj": (kv, n, c.qkv_bias),
        "self_attn.v_proj": (kv, n, c.qkv_bias),
        "self_attn.o_proj": (n, q, c.o_bias),
    }


def _latent_linears(c: ModelConfig, x: LatentConfig) -> _Linears:
    head, hidden = x.nope_dim + x.rope_dim, c.hidden_size
    queries: _Linears = {"self_attn.q_proj": (c.num_heads * head, hidden, False)}
    if x.q_rank is not None:
        queries = {
            "self_attn.q_a_proj": (x.q_rank, hidden, c.o_bias),
            "self_attn.q_b_proj": (c.num_heads * head, x.q_rank, False),
        }
    return queries | {
        "self_attn.kv_a_proj_with_mqa": (x.kv_rank + x.rope_dim, hidden, c.o_bias),
        "self_attn.kv_b_proj": (c.num_heads * (x.nope_dim + x.v_dim), x.kv_rank, False),
        "self_attn.o_proj": (hidden, c.num_heads * x.v_dim, c.o_bias),
    }


def _gated_linears(prefix: str, inner: int, outer: int, bias: bool) -> _Linears:
    return {
        f"{prefix}.gate_proj": (inner, outer, bias),
        f"{prefix}.up_proj": (inner, outer, bias),
        f"{prefix}.down_proj": (outer, inner, bias),
    }


def _expert_shapes(x: ExpertsConfig, hidden: int) -> tuple[_Linears, dict[str, tuple[int, ...]]]:
    """Linears beside the experts, and the stacked weights of all of them."""
    linears: _Linears = {"mlp.gate": (x.num_experts, hidden, False)}
    if x.shared_size:
        linears |= _gated_linears("mlp.shared_expert", x.shared_size, hidden, False)
        if x.shared_gate:
            linears["mlp.shared_expert_gate"] = (1, hidden, False)
    bias = {f"mlp.gate.{BIAS}": (x.num_experts,)} if x.biased else {}
    return linears, bias | {
        "mlp.experts.gate_up_proj": (x.num_experts, 2 * x.intermediate_size, hidden),
        "mlp.experts.down_proj": (x.num_experts, hidden, x.intermediate_size),
    }


def _qk_norm_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    if c.latent is not None:
        ranks = {"q": c.latent.q_rank, "kv": c.latent.kv_rank}
        return {f"self_attn.{part}_a_layernorm.weight": (rank,) for part, rank in ranks.items() if rank}
    if c.qk_norm:
        return {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    if c.qk_norm_whole:
        widths = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim}
        return {f"self_attn.{part}_norm.weight": (width,) for part, width in widths.items()}
    return {}


def _layer_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
        **_qk_norm_shapes(c),
    }
    linears = _attention_linears(c) if c.latent is None else _latent_linears(c, c.latent)
    if c.experts is not None and c.has_experts(layer):
        more, stacked = _expert_shapes(c.experts, c.hidden_size)
        linears |= more
        shapes |= stacked
    else:
        linears |= _gated_linears("mlp", c.intermediate_size, c.hidden_size, c.mlp_bias)
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
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
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


_EXPERT = re.compile(
    r"(model\.layers\.(?:0|[1-9][0-9]{0,3}))\.(?:mlp|block_sparse_moe)"
    r"\.experts\.(0|[1-9][0-9]{0,3})\.([a-z0-9_]{2,9})\.weight"
)
_EXPERT_PARTS = {
    "gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1),
    "w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2), "w2": ("down_proj", 0, 1),
}  # fmt: skip


def expert_part(name: str) -> ExpertPart | None:
    """What a weight of one expert (Mixtral's names or the others') is of its layer's stacked weight."""
    match = _EXPERT.fullmatch(name)
    if match is None or match[3] not in _EXPERT_PARTS:
        return None
    stacked, part, num_parts = _EXPERT_PARTS[match[3]]
    return ExpertPart(
        name=f"{match[1]}.mlp.experts.{stacked}", expert=int(match[2]), part=part, num_parts=num_parts
    )


def canonical(name: str) -> str:
    """Our name of a weight: Mixtral calls its MLP block_sparse_moe, DeepSeek's shared expert is a plural."""
    return name.replace(".block_sparse_moe.", ".mlp.").replace(".shared_experts.", ".shared_expert.")


_QUANTISABLE = re.compile(r"model\.layers\.[0-9]+\.(self_attn|mlp)\.[a-z]+_proj\.weight")


def stays_quantised(name: str, config: ModelConfig) -> bool:
    """Whether a weight may come to the model's builder as the files have it quantised: the linears of dense
    layers with plain attention, and the head. Others are always dequantised."""
    plain = config.latent is None and config.experts is None
    return name == HEAD or (plain and _QUANTISABLE.fullmatch(name) is not None)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type a weight is kept in where the model is of `dtype`: routers' biases are always float32."""
    return torch.float32 if name.endswith(BIAS) else dtype


def needless(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may carry this tensor although it is not used: it repeats what is known, or
    belongs to DeepSeek's layer for predicting further tokens."""
    tied_head = config.tied_embeddings and name == "lm_head.weight"
    predicting = config.latent is not None and name.startswith(f"model.layers.{config.num_layers}.")
    return tied_head or predicting or name.endswith("rotary_emb.inv_freq")


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
