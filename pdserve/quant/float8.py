"""FP8 numbers (Micikevicius et al., arXiv 2209.05433; OCP 8-bit floating point): E4M3 and E5M2, exactly
rounded (half to even) by torch's types, saturating.

What lives here: values, scales and fake quantisation of weights and activations. What does not: kernels.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.errors import ModelError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = {"e4m3": E4M3, "e5m2": E5M2}
TINY = 2.0**-100


def largest(dtype: torch.dtype) -> float:
    """The greatest finite value: 448 or 57344."""
    return torch.finfo(dtype).max


def to_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest values of the type; what is beyond its range becomes its greatest value, never infinity."""
    bound = largest(dtype)
    return values.to(torch.float32).clamp(-bound, bound).to(dtype)


def scale_by_row(values_MK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 [M, 1]: max |value| of the row over the type's greatest value."""
    scale_M1 = values_MK.abs().amax(-1, keepdim=True).to(torch.float32) / largest(dtype)
    return torch.where(scale_M1 < TINY, 1.0, scale_M1)


def fake_float8(
    values_MK: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """float32: what the rows stand for in FP8 under `scale` (default: one for each row)."""
    scale = scale_by_row(values_MK, dtype) if scale is None else scale
    return to_float8(values_MK / scale, dtype).to(torch.float32) * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Weight:
    """values_NK: of an FP8 type. scale_N1: float32, one for each output or [1, 1] for all. inputs: the
    layer's inputs are rounded to the same type too, with a scale for each token. Raises ModelError for other
    shapes.
    """

    values_NK: torch.Tensor
    scale_N1: torch.Tensor
    inputs: bool = False

    def __post_init__(self) -> None:
        if self.values_NK.dtype not in FLOAT8.values() or self.values_NK.dim() != 2:
            raise ModelError("The values of an FP8 weight are a matrix of E4M3 or E5M2.")
        if self.scale_N1.dtype is not torch.float32 or self.scale_N1.shape not in (
            (self.values_NK.shape[0], 1),
            (1, 1),
        ):
            raise ModelError("The scales of an FP8 weight are float32, one for each output or one for all.")

    @classmethod
    def rounded(cls, weight_NK: torch.Tensor, kind: str, *, inputs: bool) -> Float8Weight:
        """The weight in FP8 with a scale for each output."""
        scale_N1 = scale_by_row(weight_NK, FLOAT8[kind]).to(torch.bfloat16).to(torch.float32)
        values_NK = to_float8(weight_NK / scale_N1, FLOAT8[kind])
        return cls(values_NK=values_NK, scale_N1=scale_N1, inputs=inputs)

    @property
    def packed_bytes(self) -> int:
        """Bytes of values and scales (16 bits each)."""
        return self.values_NK.numel() + 2 * self.scale_N1.numel()

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain [N, K] weight."""
        return (self.values_NK.to(torch.float32) * self.scale_N1).to(dtype)

    def product(self, x_MK: torch.Tensor) -> torch.Tensor:
        """float32 [M, N] of the layer, inputs rounded where it says so."""
        x_MK = fake_float8(x_MK, self.values_NK.dtype) if self.inputs else x_MK
        return x_MK @ self.dequantise().T
