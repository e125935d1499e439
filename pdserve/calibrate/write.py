"""A quantised model as a directory: one Hugging Face model for each form, in compressed-tensors' conventions.

What lives here: the files. What does not: what is in them (`quantise`), reading them (`pdserve.models`).

    DIR/forms.json                 which form a role loads: {"version": 1, "roles": {"prefill": "prefill",
    ...}} DIR/prefill/, DIR/decode/      config.json, tokenizer, chat template, index and shards; others'
    loaders read them DIR/quality.json, layers.svg   the report

The shard with the embedding is the same file in both (a hard link).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pdserve.calibrate.quantise import LowWeight, QuantisedModel
from pdserve.errors import ConfigError, ModelError
from pdserve.models.forms import FORMS, ROLES
from pdserve.models.hf_write import ShardWriter, dense_config, write_json, write_tokenizer
from pdserve.models.loaded import DTYPES, LoadedModel
from pdserve.models.weights import HEAD
from pdserve.quant.float8 import E4M3, Float8Weight
from pdserve.quant.forms import Activation, ActivationKind, QuantWeight
from pdserve.quant.layouts import to_float8_parts, to_int, to_packed

OUTER = ("model.embed_tokens.weight", HEAD)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target` at the end and is removed if anything goes wrong.

    Raises ConfigError if the target can not be made or is not empty.
    """
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError("output: the directory is not empty; name a new one")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"output: the directory can not be used: {error.strerror}") from None
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_forms(
    model: LoadedModel, forms: Mapping[str, QuantisedModel], directory: Path, dtype: str
) -> dict[str, int]:
    """Writes each role's form into an existing, empty directory; returns bytes of weights by role.

    forms: by role, at least one. dtype: of what stays unquantised. Raises ModelError for a model whose
    family's config.json can not hold it.
    """
    folders: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for role, form in forms.items():
        same = next((r for r in folders if forms[r] is form), role)
        folders[role] = same
        sizes[role] = sizes[same] if same != role else _write_one(model, form, directory, role, dtype)
    first = next(iter(folders.values()))
    roles = {role: folders.get(role, folders.get("decode", first)) for role in ROLES}
    write_json(directory / FORMS, {"version": 1, "roles": roles})
    return sizes


def _write_one(model: LoadedModel, form: QuantisedModel, directory: Path, folder: str, dtype: str) -> int:
    target = directory / folder
    target.mkdir()
    shards = ShardWriter(target, 2)
    plain = {n: w.to(DTYPES[dtype]) for n, w in form.plain.items()}
    outer = {n: model.weights[n].to(DTYPES[dtype]) for n in OUTER if n in model.weights}
    shards.add(outer)
    inner = {n: w for n, w in plain.items() if n not in OUTER}
    for name, low in form.low.items():
        if name != HEAD:
            stem = name.removesuffix(".weight")
            inner |= {f"{stem}.{part}": t for part, t in _parts(low, DTYPES[dtype]).items()}
    shards.add(inner)
    size_bytes = shards.finish()
    write_tokenizer(target, model.tokenizer)
    described = quantization_config(next(iter(form.low.values())))
    write_json(target / "config.json", dense_config(form.config, dtype) | {"quantization_config": described})
    _share_first_shard(directory, target)
    return size_bytes


def _share_first_shard(directory: Path, target: Path) -> None:
    """Makes the embedding's file one with that of a form written before, where the disk can."""
    name = "model-00001-of-00002.safetensors"
    for other in directory.glob(f"*/{name}"):
        if other.parent != target and other.read_bytes() == (target / name).read_bytes():
            linked = target / f".{name}"
            try:
                os.link(other, linked)
            except OSError:
                return
            linked.replace(target / name)
            return


def _parts(low: LowWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    scales = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    if isinstance(low, Float8Weight):
        return to_float8_parts(low, scales)
    if low.minimum_NG is not None:
        raise ModelError("Weights with real minima have no form in compressed-tensors.")
    return to_int(low, scales) if _has_inputs(low) else to_packed(low, scales)


def _has_inputs(low: QuantWeight) -> bool:
    """Whether compressed-tensors holds it as one code a byte: it does where inputs are quantised too."""
    return low.activation.kind is not ActivationKind.NONE


def quantization_config(low: LowWeight) -> dict[str, Any]:
    """compressed-tensors' description of a model whose layers' linears are all like this one."""
    inputs = None
    if isinstance(low, QuantWeight):
        weights = _args(low.bits, "int", symmetric=low.zero_NG is None, group_size=low.group_size)
        inputs = _inputs(low.activation)
        layout = "int-quantized" if _has_inputs(low) else "pack-quantized"
    else:
        if low.values_NK.dtype is not E4M3:
            raise ModelError("compressed-tensors has FP8 in E4M3 only; E5M2 can be measured, not written.")
        weights, layout = _args(8, "float", symmetric=True, group_size=0), "float-quantized"
        inputs = _dynamic("float", "token") if low.inputs else None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _args(bits: int, kind: str, *, symmetric: bool, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size or None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }


def _dynamic(kind: str, strategy: str) -> dict[str, Any]:
    return {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None,
        "dynamic": True, "observer": None,
    }  # fmt: skip


def _inputs(activation: Activation) -> dict[str, Any] | None:
    if activation.kind is ActivationKind.NONE:
        return None
    if activation.kind is ActivationKind.TENSOR:
        return _dynamic("int", "tensor") | {"dynamic": False, "observer": "minmax"}
    if activation.kind is ActivationKind.TOKEN:
        return _dynamic("int", "token")
    return _dynamic("int", "group") | {"group_size": activation.group_size}
