"""compressed-tensors' config_groups: which linears are quantised how.

What lives here: reading the groups, and which of them a linear belongs to. What does not: tensors
(`hf_quantised`).

Patterns of targets come from a file, so only those are taken whose matching can not take long: letters,
digits, `_`, `.`, and at most four `.*`. Others raise ModelError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.fields import Fields
from pdserve.quant.forms import NO_ACTIVATION, Activation, ActivationKind

MAX_GROUPS = 64
_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_]|\\\.|\.\*|\.)*\$?")
_CLASSES = ("Linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group. activation: None for static ones, whose scale is each layer's. block: rows and columns that
    share a scale (FP8). is_float: weights are FP8; float_inputs: inputs too.
    """

    targets: tuple[str, ...]
    bits: int
    group_size: int
    activation: Activation | None
    is_float: bool = False
    float_inputs: bool = False
    block: tuple[int, int] | None = None

    def matches(self, stem: str) -> bool:
        """Whether the linear of this name belongs here."""
        return any(_matches(target, stem) for target in self.targets)


def _matches(target: str, stem: str) -> bool:
    if target in _CLASSES or target == stem:
        return True
    if not target.startswith("re:"):
        return False
    pattern = target[3:]
    if len(pattern) > 200 or pattern.count(".*") > 4 or _PATTERN.fullmatch(pattern) is None:
        raise ModelError("The model's quantization_config names linears by a pattern that is not supported.")
    return re.match(pattern, stem) is not None


def groups_of(fields: Fields) -> tuple[Group, ...]:
    """The groups; those that name linears come before those that name all. Raises ModelError for settings
    that are not followed here.
    """
    raw = fields.raw("config_groups")
    if not isinstance(raw, dict) or not 0 < len(raw) <= MAX_GROUPS:
        fields.refuse("config_groups", "must be some groups")
    found = [_group(value) for value in raw.values()]
    return tuple(sorted(found, key=lambda g: any(t in _CLASSES for t in g.targets)))


def _group(value: Any) -> Group:
    if not isinstance(value, dict):
        raise ModelError("config_groups of the model's quantization_config are malformed.")
    targets = value.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ModelError("A group of the model's quantization_config has no targets.")
    if value.get("output_activations") is not None:
        raise ModelError("The model is quantised with output activations, which is not supported.")
    described = value.get("weights") or {}
    if not isinstance(described, dict):
        raise ModelError("The weights of a group of the model's quantization_config are malformed.")
    weights = Fields(described, "quantization_config weights")
    bits, is_float = weights.integer("num_bits", 1, 16, 8), weights.text("type", "int") == "float"
    if bits not in ((8,) if is_float else (4, 8)) or weights.has("actorder"):
        raise ModelError("The model is quantised with a width or order of weights that is not supported.")
    inputs = value.get("input_activations")
    strategy = weights.text("strategy", "tensor")
    group_size = weights.integer("group_size", -1, 1 << 20) if weights.has("group_size") else 0
    return Group(
        targets=tuple(targets),
        bits=bits,
        group_size=group_size if strategy == "group" and group_size > 0 else 0,
        activation=NO_ACTIVATION if is_float else _activation(inputs),
        is_float=is_float,
        float_inputs=is_float and inputs is not None,
        block=_block(weights) if strategy == "block" else None,
    )


def _block(weights: Fields) -> tuple[int, int]:
    size = weights.raw("block_structure")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        weights.refuse("block_structure", "must be two positive integers")
    return size[0], size[1]


def _activation(value: Mapping[str, Any] | None) -> Activation | None:
    """The form of inputs; None for static."""
    if value is None:
        return NO_ACTIVATION
    if not isinstance(value, dict):
        raise ModelError("input_activations of the model's quantization_config are malformed.")
    inputs = Fields(value, "quantization_config input_activations")
    if inputs.integer("num_bits", 1, 16, 8) != 8 or inputs.text("type", "int") != "int":
        raise ModelError("The model's activations are quantised to other than 8 bits; that is not supported.")
    if not inputs.flag("symmetric", True):
        raise ModelError("The model's activations are quantised with zero points, which is not supported.")
    if not inputs.flag("dynamic", False):
        return None
    if inputs.text("strategy", "token") == "group":
        size = inputs.integer("group_size", 1, 1 << 20)
        return Activation(kind=ActivationKind.TOKEN_GROUP, group_size=size)
    return Activation(kind=ActivationKind.TOKEN)
