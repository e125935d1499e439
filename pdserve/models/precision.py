"""How a decoder's linears are held: exactly as the model's numbers, or quantised, by the name of a scheme.

What lives here: the schemes and rounding to nearest at load. What does not: better ways to choose codes
(`pdserve.quant`), the products (`pdserve.kernels`), which linears a model has (`build`).

    exact   the model's dtype; rows as they are
    w8a8    8 bits, a scale by output; rows of 8 bits, a scale by token
    w4a8    4 bits, a scale and minimum by output and group; rows of 8 bits, a scale by token and 32 inputs

The head is of 8 bits in both, with rows scaled by token and 32 inputs: its errors are the tokens'. A weight
that comes quantised (`LoadedModel.quantised`) in a scheme's form keeps its codes; others are rounded.

Legend: N outputs, K inputs, G groups of inputs, S inputs of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.linear import Linear, PackedLinear
from pdserve.kernels.quant_linear import ROW_GROUP, QuantLinear, pack_int4, pack_int8
from pdserve.quant.forms import QuantWeight

Weights = Mapping[str, torch.Tensor]
EXACT = "exact"
HEAD = "lm_head"
_TINY = 2.0**-100


class Packer(Protocol):
    """Makes linears of a model's weights."""

    def __call__(self, weights: Weights, names: Sequence[str]) -> Linear:
        """One linear with the outputs of the modules `names`, one after the other, and their biases."""
        ...


def packer(scheme: str, quantised: Mapping[str, QuantWeight], *, deterministic: bool) -> Packer:
    """The packer of a scheme. quantised: weights that come so. Raises ConfigError for an unknown scheme."""
    if scheme == EXACT:
        return ExactPacker(deterministic=deterministic)
    bits = {"w8a8": 8, "w4a8": 4}.get(scheme)
    if bits is None:
        raise ConfigError("weights: can be exact, w8a8 or w4a8")
    return QuantPacker(bits=bits, quantised=quantised)


def _bias(weights: Weights, names: Sequence[str]) -> torch.Tensor | None:
    biased = f"{names[0]}.bias" in weights
    return torch.cat([weights[f"{n}.bias"] for n in names]) if biased else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPacker:
    """Linears in the weights' own dtype."""

    deterministic: bool

    def __call__(self, weights: Weights, names: Sequence[str]) -> PackedLinear:
        """See `Packer`."""
        weight = torch.cat([weights[f"{n}.weight"] for n in names])
        return PackedLinear.pack(weight, _bias(weights, names), deterministic=self.deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPacker:
    """Linears of 8 or 4 bits."""

    bits: int
    quantised: Mapping[str, QuantWeight] = field(default_factory=dict)

    def __call__(self, weights: Weights, names: Sequence[str]) -> QuantLinear:
        """See `Packer`. A layer of which a part comes in 8 bits is one of 8 bits; so is the head."""
        parts = [self._part(weights, f"{n}.weight") for n in names]
        come_as = {p.bits for p in parts if isinstance(p, QuantWeight)}
        bias = _bias(weights, names)
        if names[0] == HEAD:
            return _int8([_plain(part) for part in parts], bias, by_group=True)
        if self.bits == 8 or 8 in come_as:
            return _int8(parts, bias)
        return _int4(parts, bias)

    def _part(self, weights: Weights, name: str) -> torch.Tensor | QuantWeight:
        kept = self.quantised.get(name)
        return weights[name] if kept is None else kept


Part = torch.Tensor | QuantWeight


def _plain(part: Part) -> torch.Tensor:
    return part.dequantise() if isinstance(part, QuantWeight) else part.to(torch.float32)


def _int8(parts: Sequence[Part], bias_N: torch.Tensor | None, *, by_group: bool = False) -> QuantLinear:
    forms = [_int8_form(part) for part in parts]
    codes, scales, zeros = (torch.cat(column) for column in zip(*forms, strict=True))
    return pack_int8(codes, scales, zeros, bias_N, by_group=by_group)


def _int8_form(part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes_NK int8, scale_N, zero_N int8)."""
    if isinstance(part, QuantWeight) and part.bits == 8 and not part.group_size and part.minimum_NG is None:
        zero_N = torch.zeros(part.num_out, dtype=torch.int8) if part.zero_NG is None else part.zero_NG[:, 0]
        return part.codes_NK, part.scale_NG[:, 0], zero_N
    weight_NK = _plain(part)
    scale_N = weight_NK.abs().amax(1).clamp(min=_TINY) / 127
    codes_NK = (weight_NK / scale_N[:, None]).round().to(torch.int8)
    return codes_NK, scale_N, torch.zeros(codes_NK.shape[0], dtype=torch.int8)


def _int4(parts: Sequence[Part], bias_N: torch.Tensor | None) -> QuantLinear:
    sizes = {_int4_group(part) for part in parts}
    group_size = sizes.pop() if len(sizes) == 1 else 0
    forms = [_int4_form(part) if group_size else _rounded_int4(_plain(part)) for part in parts]
    codes, scales, lows = (torch.cat(column) for column in zip(*forms, strict=True))
    return pack_int4(codes, scales, lows, group_size=group_size or ROW_GROUP, bias_N=bias_N)


def _int4_group(part: Part) -> int:
    """The group size of a part whose codes can stay, else that of our own rounding."""
    stays = isinstance(part, QuantWeight) and part.group_size and part.group_size % ROW_GROUP == 0
    return part.group_size if stays and isinstance(part, QuantWeight) else ROW_GROUP


def _int4_form(part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes_NK uint8 from 0 to 15, scale_NG, low_NG): weight = code * scale + low."""
    if not isinstance(part, QuantWeight) or part.group_size != _int4_group(part):
        return _rounded_int4(_plain(part))
    shift_NG = part.shift()
    low_NG = -8 * part.scale_NG if shift_NG is None else shift_NG - 8 * part.scale_NG
    return (part.codes_NK + 8).to(torch.uint8), part.scale_NG, low_NG


def _rounded_int4(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of ROW_GROUP inputs, each from its least to its greatest weight in 15 steps."""
    num_out, num_in = weight_NK.shape
    groups = -(-num_in // ROW_GROUP)
    padded = torch.nn.functional.pad(weight_NK, (0, groups * ROW_GROUP - num_in))
    groups_NGS = padded.view(num_out, groups, ROW_GROUP)
    low_NG, high_NG = groups_NGS.aminmax(dim=2)
    scale_NG = (high_NG - low_NG) / 15
    steps_NGS = (groups_NGS - low_NG[:, :, None]) / scale_NG.clamp(min=_TINY)[:, :, None]
    codes_NK = steps_NGS.round().clamp(0, 15).to(torch.uint8).flatten(1)[:, :num_in].contiguous()
    return codes_NK, scale_NG, low_NG
