"""Weights of a GGUF file under Hugging Face names.

What lives here: the name map, undoing llama.cpp's row order of q and k, reading in parallel. What does not:
block formats (`dequant`), the directory (`gguf_file`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ARCHITECTURES, ModelConfig
from pdserve.models.dequant import dequantise
from pdserve.models.gguf_config import ROPE_FACTORS
from pdserve.models.gguf_file import GGUFFile, GGUFTensor
from pdserve.models.gguf_quantised import quant_weight
from pdserve.models.stacked import ExpertPart, Stacked, stack_experts
from pdserve.models.weights import BIAS, HEAD, check_names, expert_part, stays_quantised, stored_dtype
from pdserve.quant.forms import QuantWeight

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_EXPERTS = {
    "mlp.experts.gate_proj.weight": ("mlp.experts.gate_up_proj", 0, 2),
    "mlp.experts.up_proj.weight": ("mlp.experts.gate_up_proj", 1, 2),
    "mlp.experts.down_proj.weight": ("mlp.experts.down_proj", 0, 1),
}
_K_B = ".self_attn.k_b_proj.weight"
_VECTOR_GATE = ".shared_expert_gate.weight"
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
_BIAS = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.exp_probs_b\.bias")
_ONE_EXPERT = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.ffn_(gate|up|down)\.(0|[1-9][0-9]{0,3})\.weight")
_PLAIN = re.compile(r"([a-z_]+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor. Raises ModelError for one no supported model has."""
    if match := _ONE_EXPERT.fullmatch(name):
        return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
    if match := _BIAS.fullmatch(name):
        return f"model.layers.{match[1]}.mlp.gate.{BIAS}"
    if (match := _LAYER.fullmatch(name)) and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
    if (match := _PLAIN.fullmatch(name)) and match[1] in _OUTER:
        return f"{_OUTER[match[1]]}.{match[2]}"
    raise ModelError(f"The GGUF file has a tensor that no supported model has: {name[:80]!r}.")


def _expert_part(name: str) -> ExpertPart | None:
    """What a tensor of all experts, or of one in older files, is of the stacked weight, by its name there."""
    if (part := expert_part(name)) is not None:
        return part
    layer, _, inner = name.partition(".mlp.")
    found = _EXPERTS.get(f"mlp.{inner}")
    if found is None:
        return None
    return ExpertPart(name=f"{layer}.{found[0]}", expert=None, part=found[1], num_parts=found[2])


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each head's rows for its own RoPE; this puts them back."""
    rows = weight.shape[0] // heads
    return weight.view(heads, rows // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitKV:
    """kv_b as newer files have it. k: [H, R, N], transposed; v: [H, V, R]."""

    k: GGUFTensor
    v: GGUFTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of kv_b: [H * (N + V), R], or of nothing where the two do not fit."""
        if len(self.k.shape) != 3 or len(self.v.shape) != 3 or self.k.shape[:2] != self.v.shape[::2]:
            return ()
        return self.k.shape[0] * (self.k.shape[2] + self.v.shape[1]), self.k.shape[1]


_Stored = GGUFTensor | Stacked[GGUFTensor] | _SplitKV


def _join_kv(tensors: dict[str, GGUFTensor | Stacked[GGUFTensor]]) -> dict[str, _Stored]:
    """The tensors with split kv_b under the whole one's name."""
    joined: dict[str, _Stored] = dict(tensors)
    for name in [n for n in tensors if n.endswith(_K_B)]:
        value = name.replace(".k_b_proj.", ".v_b_proj.")
        k, v = tensors[name], tensors.get(value)
        if isinstance(k, GGUFTensor) and isinstance(v, GGUFTensor):
            del joined[name], joined[value]
            joined[name.replace(".k_b_proj.", ".kv_b_proj.")] = _SplitKV(k=k, v=v)
    return joined


def _read(
    file: GGUFFile, name: str, tensor: _Stored, config: ModelConfig, dtype: torch.dtype
) -> torch.Tensor:
    def plain(t: GGUFTensor) -> torch.Tensor:
        return dequantise(file.read(t), t.kind, t.shape, dtype)

    if isinstance(tensor, Stacked):
        return tensor.read(plain, dtype)
    if isinstance(tensor, _SplitKV):
        both = torch.cat([plain(tensor.k).transpose(1, 2), plain(tensor.v)], dim=1)
        return both.reshape(tensor.shape)
    weight = plain(tensor)
    if name.endswith(_VECTOR_GATE):
        return weight.view(1, -1)
    heads = _permuted_heads(name, config)
    return weight if heads is None else _unpermute(weight, heads)


def _permuted_heads(name: str, config: ModelConfig) -> int | None:
    """Heads of a weight (q or k) whose rows llama.cpp has reordered, or None."""
    if not ARCHITECTURES[config.architecture].permuted_gguf:
        return None
    heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
    return next((num for part, num in heads.items() if part in name), None)


def _shape(name: str, tensor: _Stored) -> tuple[int, ...]:
    """llama.cpp stores the shared expert's gate as a vector."""
    vector = name.endswith(_VECTOR_GATE) and len(tensor.shape) == 1
    return (1, *tensor.shape) if vector else tensor.shape


def freq_factors(file: GGUFFile) -> tuple[float, ...]:
    """Values of the RoPE factors' tensor, empty if the file has none. Raises ModelError for a huge one."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelError("The GGUF file can not be used: its RoPE factors are not a short list.")
    return tuple(dequantise(file.read(tensor), tensor.kind, tensor.shape, torch.float32).tolist())


def weights_from_gguf(
    file: GGUFFile, config: ModelConfig, dtype: torch.dtype, *, keep_quantised: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, QuantWeight]]:
    """Every weight of the model in `dtype`, and linears that stay quantised as in `LoadedModel`.

    Raises ModelError for missing, extra or misshapen tensors.
    """
    tensors = {hf_name(name): t for name, t in file.tensors.items() if name != ROPE_FACTORS}
    whole = _join_kv(stack_experts(tensors, _expert_part))
    check_names({name: _shape(name, t) for name, t in whole.items()}, config)
    kept = _quantised(file, whole, config) if keep_quantised else {}
    weights = {
        name: _read(file, name, t, config, stored_dtype(name, dtype))
        for name, t in whole.items()
        if name not in kept
    }
    return weights, kept


def _quantised(file: GGUFFile, tensors: Mapping[str, _Stored], config: ModelConfig) -> dict[str, QuantWeight]:
    """Linears of types that kernels can take as they are, and the head even where it is the embedding."""
    head = tensors.get("model.embed_tokens.weight" if config.tied_embeddings else HEAD)
    named = {name: t for name, t in tensors.items() if stays_quantised(name, config)} | {HEAD: head}
    kept: dict[str, QuantWeight] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, GGUFTensor):
            continue
        weight = quant_weight(file.read(tensor), tensor.kind, tensor.shape)
        heads = _permuted_heads(name, config)
        if weight is not None and heads is not None:
            order = _unpermute(torch.arange(weight.num_out)[:, None], heads)[:, 0]
            weight = weight.rows(order)
        if weight is not None:
            kept[name] = weight
    return kept
