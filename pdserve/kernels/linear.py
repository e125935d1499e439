"""The linear layer: weights packed once for the CPU's caches, and one product for every number of rows.

A row's result is one chain of fused multiply-adds over K in order, whatever M, the other rows and the number
of threads: both dtypes are row-invariant bit for bit. Quantised schemes come in beside `PackedLinear`.

Legend: M rows (tokens), N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A linear layer's weight in the kernel's order. num_out, num_in: N, K of the plain weight."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_out: int
    num_in: int
    dtype: torch.dtype

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
        weight = weight_NK.to(dtype).contiguous()
        return cls(weight=weight, bias=bias, num_out=num_out, num_in=num_in, dtype=dtype)


def linear(x_MK: torch.Tensor, packed: PackedLinear, *, out_float32: bool = False) -> torch.Tensor:
    """x @ weight.T + bias, [M, N] in x's dtype (the packed one), summed in float32.

    out_float32: return the float32 sums unrounded (logits: bfloat16 would tie them).
    """
    return linear_reference(x_MK, packed, out_float32=out_float32)


def linear_reference(x_MK: torch.Tensor, packed: PackedLinear, *, out_float32: bool = False) -> torch.Tensor:
    """Plain torch form of `linear`."""
    out = x_MK.float() @ packed.weight.float().T
    if packed.bias is not None:
        out = out + packed.bias
    return out if out_float32 else out.to(packed.dtype)
