"""The linear layer: weights packed once for the CPU's caches, and one product for every number of rows.

A row's result is one chain of fused multiply-adds over K in order, whatever M, the other rows and the number
of threads: both dtypes are row-invariant bit for bit. Quantised schemes come in beside `PackedLinear`.

Legend: M rows (tokens), N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.kernels.memory import empty_weight
from pdserve.kernels.native import DTYPE_CODE, library


class Linear(Protocol):
    """What a layer needs of a linear: `PackedLinear`, or what wraps one (other ranks, other schemes)."""

    @property
    def num_out(self) -> int:
        """N of its result."""
        ...

    def __call__(self, x_MK: torch.Tensor, /, *, out_float32: bool = False) -> torch.Tensor:
        """As `linear` of this module."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A linear layer's weight in panels: [N / panel, K steps, panel] of 4-byte steps (one float32, or a pair
    of bfloat16), zero-padded. num_out, num_in: N, K of the plain weight. bias: float32, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_out: int
    num_in: int
    dtype: torch.dtype
    panel: int

    @classmethod
    def pack(
        cls,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> PackedLinear:
        """Pack a plain [N, K] weight (kept by nobody here) as dtype (default: the weight's own).

        deterministic: a row's result must not depend on other rows; both schemes so far give it anyway.
        """
        dtype = dtype or weight_NK.dtype
        bias = None if bias_N is None else bias_N.to(torch.float32).contiguous()
        num_out, num_in = weight_NK.shape
        panel = library().pds_panel_width()
        panels, steps = -(-num_out // panel), -(-num_in * dtype.itemsize // 4)
        packed = empty_weight(panels * steps * panel * 4 // dtype.itemsize, dtype)
        plain = weight_NK.to(dtype).contiguous()
        library().pds_pack_linear(packed.data_ptr(), plain.data_ptr(), num_out, num_in, DTYPE_CODE[dtype])
        return cls(weight=packed, bias=bias, num_out=num_out, num_in=num_in, dtype=dtype, panel=panel)

    def __call__(self, x_MK: torch.Tensor, *, out_float32: bool = False) -> torch.Tensor:
        """See `linear`."""
        return linear(x_MK, self, out_float32=out_float32)

    def unpack(self) -> torch.Tensor:
        """The plain [N, K] weight again."""
        pair = 4 // self.dtype.itemsize
        steps = -(-self.num_in // pair)
        panels = self.weight.view(-1, steps, self.panel, pair)
        return panels.transpose(1, 2).reshape(-1, steps * pair)[: self.num_out, : self.num_in]


def linear(x_MK: torch.Tensor, packed: PackedLinear, *, out_float32: bool = False) -> torch.Tensor:
    """x @ weight.T + bias, [M, N] in x's dtype (the packed one), summed in float32.

    out_float32: return the float32 sums unrounded (logits: bfloat16 would tie them).
    """
    assert x_MK.dtype is packed.dtype
    x_MK = x_MK.contiguous()
    rows = x_MK.shape[0]
    out = torch.empty(rows, packed.num_out, dtype=torch.float32 if out_float32 else packed.dtype)
    library().pds_linear(
        out.data_ptr(), x_MK.data_ptr(), packed.weight.data_ptr(),
        None if packed.bias is None else packed.bias.data_ptr(),
        rows, packed.num_out, packed.num_in, DTYPE_CODE[packed.dtype], out_float32,
    )  # fmt: skip
    return out


def linear_reference(x_MK: torch.Tensor, packed: PackedLinear, *, out_float32: bool = False) -> torch.Tensor:
    """Plain torch form of `linear`."""
    out = x_MK.float() @ packed.unpack().float().T
    if packed.bias is not None:
        out = out + packed.bias
    return out if out_float32 else out.to(packed.dtype)
