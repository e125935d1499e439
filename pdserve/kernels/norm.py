"""RMS norm (Zhang & Sennrich 2019), rounded as Hugging Face does: float32, cast to dtype, then times weight.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

import torch

from pdserve.kernels.native import DTYPE_CODE, library


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dim, any leading dims. x and weight share a dtype."""
    x_TE = x_TE.contiguous()
    out = torch.empty_like(x_TE)
    width = weight_E.shape[0]
    library().pds_rms_norm(
        out.data_ptr(), x_TE.data_ptr(), weight_E.data_ptr(), x_TE.numel() // width, width, eps,
        DTYPE_CODE[x_TE.dtype],
    )  # fmt: skip
    return out


def rms_norm_reference(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch form of `rms_norm`."""
    x = x_TE.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x_TE.dtype) * weight_E


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to dtype first. Inputs are kept."""
    x_TE, residual_TE = x_TE.contiguous(), residual_TE.contiguous()
    out, total = torch.empty_like(x_TE), torch.empty_like(x_TE)
    width = weight_E.shape[0]
    library().pds_add_rms_norm(
        out.data_ptr(), total.data_ptr(), x_TE.data_ptr(), residual_TE.data_ptr(), weight_E.data_ptr(),
        x_TE.numel() // width, width, eps, DTYPE_CODE[x_TE.dtype],
    )  # fmt: skip
    return out, total


def add_rms_norm_reference(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `add_rms_norm`."""
    total = x_TE + residual_TE
    return rms_norm_reference(total, weight_E, eps), total
