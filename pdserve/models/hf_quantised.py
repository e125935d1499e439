"""Quantised checkpoints: config.json's quantization_config, and a model's quantised linears among its
tensors.

What lives here: which layout a checkpoint has, which tensors make one linear, reading it. What does not: the
layouts' bits (`pdserve.quant.layouts`).

Methods: compressed-tensors (int-quantized, naive-quantized, pack-quantized, float-quantized), awq (gemm),
gptq, fp8. Others, and settings that would change the numbers and that we do not follow, raise ModelError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pdserve.errors import ModelError
from pdserve.models.fields import Fields
from pdserve.models.hf_groups import Group, groups_of
from pdserve.models.safetensors_file import StoredTensor
from pdserve.quant import layouts
from pdserve.quant.float8 import Float8Weight
from pdserve.quant.forms import QuantWeight

LowWeight = QuantWeight | Float8Weight | torch.Tensor
"""A linear as it is stored; a float32 matrix where no form of ours holds it."""
_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx",
    "input_scale", "input_zero_point", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip


class Layout(Protocol):
    """How a checkpoint's linears are stored."""

    def shape(self, stem: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """[N, K] of a linear, from headers alone."""
        ...

    def read(self, stem: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> LowWeight:
        """The linear from its tensors. Raises ModelError where they do not fit together."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """One quantised linear of a file. shape: [N, K] of its plain weight. stem: its name without ".weight"."""

    shape: tuple[int, int]
    stem: str
    parts: Mapping[str, StoredTensor]
    layout: Layout

    def low(self) -> LowWeight:
        """As it is stored. Raises ModelError for tensors that do not fit together."""
        parts = {name: tensor.read(tensor.dtype) for name, tensor in self.parts.items()}
        found = self.layout.read(self.stem, parts, self.shape)
        shape = found.shape if isinstance(found, torch.Tensor) else _codes(found).shape
        if shape != self.shape:
            raise ModelError(f"The quantised weight {self.stem[:80]} has another shape than it says.")
        return found

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised."""
        low = self.low()
        return low.to(dtype) if isinstance(low, torch.Tensor) else low.dequantise(dtype)


def _codes(weight: QuantWeight | Float8Weight) -> torch.Tensor:
    return weight.codes_NK if isinstance(weight, QuantWeight) else weight.values_NK


def split_linears(
    tensors: Mapping[str, StoredTensor], layout: Layout
) -> dict[str, StoredTensor | StoredLinear]:
    """The tensors by name, with those of a quantised linear put together as its weight."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix in _SUFFIXES:
            parts.setdefault(stem, {})[suffix] = tensor
    whole: dict[str, StoredTensor | StoredLinear] = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight" and stem in parts:
            parts[stem]["weight"] = tensor
        elif suffix not in _SUFFIXES:
            whole[name] = tensor
    for stem, found in parts.items():
        shape = layout.shape(stem, found)
        whole[f"{stem}.weight"] = StoredLinear(shape=shape, stem=stem, parts=found, layout=layout)
    return whole


def layout_of(values: Mapping[str, Any]) -> Layout:
    """The layout that a quantization_config describes. Raises ModelError for one that is not read here."""
    fields = Fields(values, "quantization_config")
    method = fields.text("quant_method")
    if method == "compressed-tensors":
        return _Compressed(groups=groups_of(fields))
    if method == "awq":
        return _awq(fields)
    if method == "gptq":
        return _gptq(fields)
    if method == "fp8":
        return _fp8(fields)
    raise ModelError(
        f"The model is quantised by {method[:40]!r}, which is not supported; supported are "
        "compressed-tensors, awq, gptq and fp8."
    )


def _matrix(tensor: StoredTensor | None, what: str) -> tuple[int, int]:
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"A quantised weight of the model has no {what} that is a matrix.")
    return tensor.shape[0], tensor.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compressed:
    groups: tuple[Group, ...]

    def shape(self, stem: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        if "weight_packed" not in parts:
            return _matrix(parts.get("weight"), "weight")
        stored = parts.get("weight_shape")
        if stored is None or stored.shape != (2,):
            raise ModelError("A quantised weight of the model has no weight_shape.")
        num_out, num_in = (int(n) for n in stored.read(torch.int64))
        return num_out, num_in

    def read(self, stem: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> LowWeight:
        group = next((g for g in self.groups if g.matches(stem)), None)
        if group is None:
            raise ModelError(f"The model's quantization_config says nothing of the linear {stem[:80]}.")
        if "weight_g_idx" in parts or ("input_zero_point" in parts and bool(parts["input_zero_point"].any())):
            raise ModelError(
                "The model is quantised with groups out of order, or with activations that have zero points; "
                "neither is supported."
            )
        if group.is_float:
            return layouts.from_float8(parts, inputs=group.float_inputs, block=group.block)
        size, activation = group.group_size, group.activation
        if "weight_packed" in parts:
            return layouts.from_packed(parts, shape, group.bits, size, activation)
        return layouts.from_int(parts, group.bits, size, activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Awq:
    group_size: int

    def shape(self, stem: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        num_in, words = _matrix(parts.get("qweight"), "qweight")
        return words * 8, num_in

    def read(self, stem: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> LowWeight:
        return layouts.from_awq(parts, shape, self.group_size)


def _group_size(fields: Fields) -> int:
    """0 for one group, which files call -1."""
    size = fields.integer("group_size", -1, 1 << 20, 128)
    return 0 if size < 0 else size


def _awq(fields: Fields) -> _Awq:
    if fields.text("version", "gemm").lower() != "gemm" or fields.integer("bits", 1, 16, 4) != 4:
        raise ModelError("AWQ models are supported in the gemm version with 4 bits only.")
    if not fields.flag("zero_point", True):
        raise ModelError("AWQ models are supported with zero points only.")
    return _Awq(group_size=_group_size(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gptq:
    bits: int
    group_size: int
    zero_offset: int

    def shape(self, stem: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        words, num_out = _matrix(parts.get("qweight"), "qweight")
        return num_out, words * (32 // self.bits)

    def read(self, stem: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> LowWeight:
        return layouts.from_gptq(parts, shape, self.bits, self.group_size, zero_offset=self.zero_offset)


def _gptq(fields: Fields) -> _Gptq:
    bits = fields.integer("bits", 2, 8)
    if bits not in (4, 8):
        raise ModelError("GPTQ models are supported with 4 and 8 bits only.")
    form = fields.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError("GPTQ models are supported in the formats gptq and gptq_v2 only.")
    return _Gptq(bits=bits, group_size=_group_size(fields), zero_offset=int(form == "gptq"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Float8:
    block: tuple[int, int] | None

    def shape(self, stem: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        return _matrix(parts.get("weight"), "weight")

    def read(self, stem: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> LowWeight:
        return layouts.from_float8(parts, inputs=True, block=self.block)


def _fp8(fields: Fields) -> _Float8:
    size = fields.raw("weight_block_size")
    if size is None:
        return _Float8(block=None)
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        fields.refuse("weight_block_size", "must be two positive integers")
    return _Float8(block=(size[0], size[1]))
