"""A Hugging Face model directory: config.json and one or several safetensors files.

What lives here: which files there are and which weight lies in which. What does not: one file's format
(`safetensors_file`), the tokenizer and the end tokens (`pdserve.tokenizer.from_dir`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ModelConfig
from pdserve.models.hf_config import config_from_hf
from pdserve.models.hf_quantised import Layout, StoredLinear, layout_of, split_linears
from pdserve.models.json_file import MAX_INDEX_BYTES, read_object
from pdserve.models.safetensors_file import StoredTensor, read_safetensors
from pdserve.models.stacked import Stacked, stack_experts
from pdserve.models.weights import (
    HEAD,
    canonical,
    check_names,
    expert_part,
    stays_quantised,
    stored_dtype,
    weight_shapes,
)
from pdserve.quant.forms import NO_ACTIVATION, QuantWeight
from pdserve.quant.rounding import Grid, round_to_nearest
from pdserve.quant.schemes import HEAD_INPUT

_log = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4096
_CACHE_SCALES = (".k_scale", ".v_scale")
"""Fixed scales for a cache in FP8; ours finds its own."""
Stored = StoredTensor | StoredLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checked directory. tensors: by our names. files: everything that decides what the model computes."""

    config: ModelConfig
    tensors: dict[str, Stored | Stacked[Stored]]
    files: tuple[Path, ...]


def _shards(directory: Path) -> dict[str, str]:
    """File name by weight, from the index. Raises ModelError for names that are not plain files here."""
    weight_map = read_object(directory / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX} has no weight_map.")
    names = set(weight_map.values()) if all(isinstance(v, str) for v in weight_map.values()) else {""}
    if any(Path(n).name != n or not n.endswith(".safetensors") for n in names) or len(names) > MAX_SHARDS:
        raise ModelError(f"{INDEX} names files that are not safetensors files of the same directory.")
    return weight_map


def _sharded(directory: Path, shards: dict[str, str], quantised: bool) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(shards.values())):
        for weight, tensor in read_safetensors(directory / name, quantised=quantised).items():
            if weight in tensors:
                raise ModelError(f"The weight {weight[:80]} lies in two of the model's files.")
            if shards.get(weight, name) != name:
                raise ModelError(f"The weight {weight[:80]} lies in another file than {INDEX} says.")
            tensors[weight] = tensor
    return tensors


def read_directory(directory: Path) -> ModelFiles:
    """Reads and checks all headers of a model directory. Raises ModelError for anything it can not trust."""
    values = read_object(directory / "config.json")
    layout = _layout(values)
    config = config_from_hf(values)
    if (directory / SINGLE).is_file():
        tensors = read_safetensors(directory / SINGLE, quantised=layout is not None)
    elif (directory / INDEX).is_file():
        tensors = _sharded(directory, _shards(directory), layout is not None)
    else:
        raise ModelError(
            f"The model directory has neither {SINGLE} nor {INDEX}; only safetensors are loaded."
        )
    whole = _whole(tensors, layout)
    named = {canonical(name): t for name, t in stack_experts(whole, expert_part).items()}
    check_names({name: t.shape for name, t in named.items()}, config)
    weights = {t.path for t in tensors.values()}
    return ModelFiles(config=config, tensors=named, files=(directory / "config.json", *sorted(weights)))


def _layout(values: Mapping[str, Any]) -> Layout | None:
    described = values.get("quantization_config")
    if described is None:
        return None
    if not isinstance(described, dict):
        raise ModelError("config.json is not usable: quantization_config must be an object.")
    return layout_of(described)


def _whole(tensors: dict[str, StoredTensor], layout: Layout | None) -> dict[str, Stored]:
    """The tensors with each quantised linear as one."""
    if layout is None:
        return dict(tensors)
    kept = {name: t for name, t in tensors.items() if not name.endswith(_CACHE_SCALES)}
    whole = split_linears(kept, layout)
    for name, tensor in whole.items():
        if isinstance(tensor, StoredTensor) and not tensor.is_float:
            raise ModelError(f"The weight {name[:80]} is quantised but has no scales.")
    return whole


def read_weights(
    files: ModelFiles, dtype: torch.dtype, *, keep_quantised: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, QuantWeight]]:
    """Every weight of the model in `dtype` (see `stored_dtype`), and linears that stay quantised.

    keep_quantised: as for `load_model`. The head of a quantised model is rounded to 8 bits by output then,
    where its file has it plain.
    """
    kept = _quantised(files) if keep_quantised else {}
    if low := [n for n, t in files.tensors.items() if isinstance(t, StoredLinear) and n not in kept]:
        _log.info("%d quantised linears are dequantised to %s: no kernel takes them here", len(low), dtype)
    names = [name for name in weight_shapes(files.config) if name not in kept]
    weights = {name: _read(files.tensors[name], stored_dtype(name, dtype)) for name in names}
    if kept and HEAD not in kept:
        head = weights["model.embed_tokens.weight"] if files.config.tied_embeddings else weights.pop(HEAD)
        inputs = {weight.activation for weight in kept.values()}
        rounded = round_to_nearest(head, Grid(bits=8))
        kept[HEAD] = rounded if NO_ACTIVATION in inputs else rounded.with_activation(HEAD_INPUT)
    return weights, kept


def _quantised(files: ModelFiles) -> dict[str, QuantWeight]:
    """Linears whose stored form kernels can take."""
    kept: dict[str, QuantWeight] = {}
    for name, tensor in files.tensors.items():
        if isinstance(tensor, StoredLinear) and stays_quantised(name, files.config):
            low = tensor.low()
            if isinstance(low, QuantWeight):
                kept[name] = low
    return kept


def _read(tensor: Stored | Stacked[Stored], dtype: torch.dtype) -> torch.Tensor:
    if isinstance(tensor, Stacked):
        return tensor.read(lambda piece: piece.read(dtype), dtype)
    return tensor.read(dtype)
