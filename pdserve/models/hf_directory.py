"""A Hugging Face model directory: config.json and one or several safetensors files.

What lives here: which files there are and which weight lies in which. What does not: one file's format
(`safetensors_file`), the tokenizer and the end tokens (`pdserve.tokenizer.from_dir`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ModelConfig
from pdserve.models.hf_config import config_from_hf
from pdserve.models.json_file import MAX_INDEX_BYTES, read_object
from pdserve.models.safetensors_file import StoredTensor, read_safetensors
from pdserve.models.stacked import Stacked, stack_experts
from pdserve.models.weights import canonical, check_names, expert_part, stored_dtype, weight_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checked directory. tensors: by our names. files: everything that decides what the model computes."""

    config: ModelConfig
    tensors: dict[str, StoredTensor | Stacked[StoredTensor]]
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


def _sharded(directory: Path, shards: dict[str, str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(shards.values())):
        for weight, tensor in read_safetensors(directory / name).items():
            if weight in tensors:
                raise ModelError(f"The weight {weight[:80]} lies in two of the model's files.")
            if shards.get(weight, name) != name:
                raise ModelError(f"The weight {weight[:80]} lies in another file than {INDEX} says.")
            tensors[weight] = tensor
    return tensors


def read_directory(directory: Path) -> ModelFiles:
    """Reads and checks all headers of a model directory. Raises ModelError for anything it can not trust."""
    config = config_from_hf(read_object(directory / "config.json"))
    if (directory / SINGLE).is_file():
        tensors = read_safetensors(directory / SINGLE)
    elif (directory / INDEX).is_file():
        tensors = _sharded(directory, _shards(directory))
    else:
        raise ModelError(
            f"The model directory has neither {SINGLE} nor {INDEX}; only safetensors are loaded."
        )
    named = {canonical(name): t for name, t in stack_experts(tensors, expert_part).items()}
    check_names({name: t.shape for name, t in named.items()}, config)
    weights = {t.path for t in tensors.values()}
    return ModelFiles(config=config, tensors=named, files=(directory / "config.json", *sorted(weights)))


def read_weights(files: ModelFiles, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight of the model in `dtype` (see `stored_dtype`)."""
    names = weight_shapes(files.config)
    return {name: _read(files.tensors[name], stored_dtype(name, dtype)) for name in names}


def _read(tensor: StoredTensor | Stacked[StoredTensor], dtype: torch.dtype) -> torch.Tensor:
    if isinstance(tensor, Stacked):
        return tensor.read(lambda piece: piece.read(dtype), dtype)
    return tensor.read(dtype)
