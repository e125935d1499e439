"""Quantised linear layers: 8-bit rows times 8- or 4-bit weights, beside the exact `PackedLinear`.

A row is quantised to symmetric 8 bits when it arrives: with one scale (8-bit weights), or one for each 32
inputs (4-bit weights, and 8-bit ones where rows have outliers). Products of codes are summed exactly in
integers, so a row's result depends on the row alone. How codes are chosen is not here (`pdserve.quant`).

    8 bits   y = (sum x * w) * scale_N * scale_M           w: code less zero
             y = sum over groups of (sum x * w) * scale_MA, times scale_N, where asked for
    4 bits   y = sum over groups of (sum x * c) * scale_NG * scale_MA + low_NG * sum x

Legend: M rows (tokens), N outputs, K inputs, G groups of a weight's inputs, A groups of 32 inputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.memory import empty_weight
from pdserve.kernels.native import DTYPE_CODE, library
from pdserve.quant.forms import Activation, ActivationKind, quantise_rows, spread

ROW_GROUP = 32
"""Inputs that share a scale where rows are scaled by group (csrc/dot.h)."""
MAX_INPUTS = 1 << 16
"""Inputs whose sums of codes surely fit 32 bits."""
_BY_GROUP = Activation(kind=ActivationKind.TOKEN_GROUP, group_size=ROW_GROUP)


class NativeQuantLinear(ctypes.Structure):
    """The C++ side's `QuantLinear` (csrc/quantised.h)."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
        ("group_blocks", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantLinear:
    """A packed layer. bits: 8 or 4. weight: bytes in the kernels' order. scales: float32 by output (4 bits:
    the power of two that all scales of an output are times). offsets: int32 by output, 8 bits alone. bias:
    float32 or None. by_group: rows are scaled by group of ROW_GROUP inputs.
    """

    bits: int
    by_group: bool
    weight: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bias: torch.Tensor | None
    num_out: int
    num_in: int
    group_size: int
    native: int = field(init=False, repr=False)
    """Address of the C++ descriptor."""
    _keep: NativeQuantLinear = field(init=False, repr=False)

    def __post_init__(self) -> None:
        native = NativeQuantLinear(
            self.weight.data_ptr(), self.scales.data_ptr(), _address(self.offsets), _address(self.bias),
            9 if self.bits == 8 and self.by_group else self.bits, self.num_out, self.num_in,
            self.group_size // ROW_GROUP,
        )  # fmt: skip
        object.__setattr__(self, "_keep", native)
        object.__setattr__(self, "native", ctypes.addressof(native))

    def __call__(self, x_MK: torch.Tensor, *, out_float32: bool = False) -> torch.Tensor:
        """x @ weight.T + bias, [M, N] in x's dtype, or float32 unrounded."""
        x_MK = x_MK.contiguous()
        rows = x_MK.shape[0]
        out = torch.empty(rows, self.num_out, dtype=torch.float32 if out_float32 else x_MK.dtype)
        library().pds_quant_linear(
            out.data_ptr(), x_MK.data_ptr(), self.native, rows, DTYPE_CODE[x_MK.dtype], DTYPE_CODE[out.dtype]
        )
        return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_inputs(num_in: int) -> None:
    if num_in > MAX_INPUTS:
        raise ConfigError(f"a quantised layer has more than {MAX_INPUTS} inputs; use exact weights")


def _padded(values_N: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(length, dtype=dtype)
    out[: values_N.shape[0]] = values_N
    return out


def _bias(bias_N: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias_N is None else bias_N.to(torch.float32).contiguous()


def pack_int8(
    codes_NK: torch.Tensor,
    scale_N: torch.Tensor,
    zero_N: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    *,
    by_group: bool = False,
) -> QuantLinear:
    """An 8-bit layer of weight (code - zero) * scale. codes_NK: int8. by_group: rows have scales by group.

    Raises ConfigError for too many inputs, and for zeros other than 0 by group.
    """
    num_out, num_in = codes_NK.shape
    _check_inputs(num_in)
    width = library().pds_int8_panel_width()
    length = -(-num_out // width) * width
    weight = empty_weight(length * -(-num_in // 4) * 4, torch.uint8)
    codes_NK = codes_NK.contiguous()
    library().pds_pack_int8(weight.data_ptr(), codes_NK.data_ptr(), num_out, num_in)
    zeros = torch.zeros(num_out, dtype=torch.int32) if zero_N is None else zero_N.to(torch.int32)
    if by_group and bool(zeros.any()):
        raise ConfigError("8-bit weights with zeros are not supported where rows are scaled by group")
    return QuantLinear(
        bits=8,
        by_group=by_group,
        weight=weight,
        scales=_padded(scale_N, length, torch.float32),
        offsets=_padded(zeros + 128, length, torch.int32),
        bias=_bias(bias_N),
        num_out=num_out,
        num_in=num_in,
        group_size=0,
    )


def halves(scale_NG: torch.Tensor, low_NG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scales, lows, factor_N): 16-bit floats, and the power of two by output that both are times."""
    top_N = torch.maximum(scale_NG.abs().amax(1), low_NG.abs().amax(1)).clamp(min=2.0**-100)
    factor_N = torch.exp2(torch.ceil(torch.log2(top_N)))
    scaled = (part / factor_N[:, None] for part in (scale_NG, low_NG))
    scale, low = (part.to(torch.float16).contiguous() for part in scaled)
    return scale, low, factor_N


def pack_int4(
    codes_NK: torch.Tensor,
    scale_NG: torch.Tensor,
    low_NG: torch.Tensor,
    *,
    group_size: int,
    bias_N: torch.Tensor | None = None,
) -> QuantLinear:
    """A 4-bit layer of weight code * scale + low. codes_NK: uint8, 0 to 15. group_size: of scale and low.

    Scales and lows are kept as 16-bit floats (`halves`). Raises ConfigError for a group size that is no
    multiple of 32, and for too many inputs.
    """
    num_out, num_in = codes_NK.shape
    _check_inputs(num_in)
    if group_size <= 0 or group_size % ROW_GROUP:
        raise ConfigError(
            f"4-bit weights of groups of {group_size} are not supported; use a multiple of {ROW_GROUP}"
        )
    scale, low, factor_N = halves(scale_NG, low_NG)
    blocks = group_size // ROW_GROUP
    weight = empty_weight(library().pds_int4_bytes(num_out, num_in, blocks), torch.uint8)
    codes_NK = codes_NK.contiguous()
    library().pds_pack_int4(
        weight.data_ptr(), codes_NK.data_ptr(), scale.data_ptr(), low.data_ptr(), num_out, num_in, blocks
    )
    return QuantLinear(
        bits=4,
        by_group=True,
        weight=weight,
        scales=_padded(factor_N, -(-num_out // ROW_GROUP) * ROW_GROUP, torch.float32),
        offsets=None,
        bias=_bias(bias_N),
        num_out=num_out,
        num_in=num_in,
        group_size=group_size,
    )


def _rows_reference(x_MK: torch.Tensor) -> torch.Tensor:
    """What rows scaled by group stand for, float64 [M, K]."""
    codes_MK, scale_MA = quantise_rows(x_MK, _BY_GROUP)
    return codes_MK.double() * spread(scale_MA.double(), x_MK.shape[1], ROW_GROUP)


def int8_reference(
    x_MK: torch.Tensor, codes_NK: torch.Tensor, scale_N: torch.Tensor, zero_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain torch form of an 8-bit layer with one scale a row, float32: the same bits."""
    codes_MK, scale_M1 = quantise_rows(x_MK, Activation(kind=ActivationKind.TOKEN))
    weight = codes_NK.double() if zero_N is None else codes_NK.double() - zero_N.double()[:, None]
    dots_MN = codes_MK.double() @ weight.T
    return dots_MN.float() * scale_N * scale_M1


def int8_grouped_reference(x_MK: torch.Tensor, codes_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    """Plain torch form of an 8-bit layer with rows scaled by group, float64: the same but for rounding."""
    return _rows_reference(x_MK) @ (codes_NK.double() * scale_N.double()[:, None]).T


def int4_reference(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_NG: torch.Tensor,
    low_NG: torch.Tensor,
    *,
    group_size: int,
) -> torch.Tensor:
    """Plain torch form of a 4-bit layer, float64: the same value but for rounding."""
    scale, low, factor_N = halves(scale_NG, low_NG)
    wide = [spread(part.double() * factor_N[:, None], x_MK.shape[1], group_size) for part in (scale, low)]
    return _rows_reference(x_MK) @ (codes_NK.double() * wide[0] + wide[1]).T
