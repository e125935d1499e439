"""Weights of a GGUF file under Hugging Face names.

What lives here: the name map, undoing llama.cpp's row order of q and k, reading in parallel. What does not:
block formats (`dequant`), the directory (`gguf_file`).
"""

from __future__ import annotations

import re

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ARCHITECTURES, ModelConfig
from pdserve.models.dequant import dequantise
from pdserve.models.gguf_config import ROPE_FACTORS
from pdserve.models.gguf_file import GGUFFile, GGUFTensor
from pdserve.models.stacked import ExpertPart, Stacked, stack_experts
from pdserve.models.weights import check_names

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
}
_EXPERTS = {
    "mlp.experts.gate_proj.weight": ("mlp.experts.gate_up_proj", 0, 2),
    "mlp.experts.up_proj.weight": ("mlp.experts.gate_up_proj", 1, 2),
    "mlp.experts.down_proj.weight": ("mlp.experts.down_proj", 0, 1),
}
_VECTOR_GATE = ".shared_expert_gate.weight"
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
_PLAIN = re.compile(r"([a-z_]+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor. Raises ModelError for one no supported model has."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
    if (match := _PLAIN.fullmatch(name)) and match[1] in _OUTER:
        return f"{_OUTER[match[1]]}.{match[2]}"
    raise ModelError(f"The GGUF file has a tensor that no supported model has: {name[:80]!r}.")


def _expert_part(name: str) -> ExpertPart | None:
    """What a tensor of all experts (under its Hugging Face name) is of the stacked weight."""
    layer, _, inner = name.partition(".mlp.")
    found = _EXPERTS.get(f"mlp.{inner}")
    if found is None:
        return None
    return ExpertPart(name=f"{layer}.{found[0]}", expert=None, part=found[1], num_parts=found[2])


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each head's rows for its own RoPE; this puts them back."""
    rows = weight.shape[0] // heads
    return weight.view(heads, rows // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _read(
    file: GGUFFile,
    name: str,
    tensor: GGUFTensor | Stacked[GGUFTensor],
    config: ModelConfig,
    dtype: torch.dtype,
) -> torch.Tensor:
    def plain(t: GGUFTensor) -> torch.Tensor:
        return dequantise(file.read(t), t.kind, t.shape, dtype)

    if isinstance(tensor, Stacked):
        return tensor.read(plain, dtype)
    weight = plain(tensor)
    if name.endswith(_VECTOR_GATE):
        return weight.view(1, -1)
    if not ARCHITECTURES[config.architecture].permuted_gguf:
        return weight
    heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
    for part, num in heads.items():
        if part in name:
            return _unpermute(weight, num)
    return weight


def _shape(name: str, tensor: GGUFTensor | Stacked[GGUFTensor]) -> tuple[int, ...]:
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


def weights_from_gguf(file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight of the model in `dtype`. Raises ModelError for missing, extra or misshapen tensors."""
    tensors = {hf_name(name): t for name, t in file.tensors.items() if name != ROPE_FACTORS}
    whole = stack_experts(tensors, _expert_part)
    check_names({name: _shape(name, t) for name, t in whole.items()}, config)
    return {name: _read(file, name, t, config, dtype) for name, t in whole.items()}
