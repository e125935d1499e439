"""Rotary position embedding (Su et al., RoFormer; rotate-half convention as in HF Llama), alone and fused
with the head norms of Qwen3 before it and the KV write after it. Tables of cos and sin are the caller's.

Legend: T tokens, H query heads, K KV heads, D head dim, F = (H + 2K) * D.
"""

from __future__ import annotations

import torch

from pdserve.kernels.kv_view import KVView
from pdserve.kernels.native import DTYPE_CODE, check, library
from pdserve.kernels.norm import rms_norm_reference
from pdserve.kernels.write_kv import write_kv_reference


def apply_rope(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * cos + rotate_half(x) * sin) of q and k, in float32, rounded once to their dtype.

    cos_TD, sin_TD: float32, per token; the second half of D repeats the first.
    """
    return _rotated(q_THD, cos_TD, sin_TD), _rotated(k_TKD, cos_TD, sin_TD)


def apply_rope_reference(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `apply_rope`."""
    return _rotate(q_THD, cos_TD, sin_TD), _rotate(k_TKD, cos_TD, sin_TD)


def rope_and_write_kv(
    qkv_TF: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    kv: KVView,
    layer: int,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """From the fused projection (q heads, then k, then v) to q_THD, with k and v written to their slots.

    q_norm_D, k_norm_D: weights of the RMS norms over each head before rope (Qwen3), or None. Otherwise as
    `apply_rope` and `write_kv`, which see.
    """
    assert kv.takes(qkv_TF.dtype)
    assert slots_T.dtype is torch.int32
    assert cos_TD.dtype is torch.float32
    qkv_TF = qkv_TF.contiguous()
    tokens, dtype = qkv_TF.shape[0], qkv_TF.dtype
    q_THD = torch.empty(tokens, num_heads, kv.head_dim, dtype=dtype)
    status = library().pds_rope_and_write_kv(
        q_THD.data_ptr(), qkv_TF.data_ptr(), cos_TD.data_ptr(), sin_TD.data_ptr(), kv.native, layer,
        slots_T.data_ptr(), tokens, num_heads, None if q_norm_D is None else q_norm_D.data_ptr(),
        None if k_norm_D is None else k_norm_D.data_ptr(), eps, DTYPE_CODE[dtype],
    )  # fmt: skip
    check(status)
    return q_THD


def rope_and_write_kv_reference(
    qkv_TF: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    kv: KVView,
    layer: int,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Plain torch form of `rope_and_write_kv`."""
    rows = qkv_TF.view(qkv_TF.shape[0], -1, kv.head_dim)
    end_k = num_heads + kv.num_kv_heads
    q, k, v = rows[:, :num_heads], rows[:, num_heads:end_k], rows[:, end_k:]
    q = q if q_norm_D is None else rms_norm_reference(q, q_norm_D, eps)
    k = k if k_norm_D is None else rms_norm_reference(k, k_norm_D, eps)
    write_kv_reference(_rotate(k, cos_TD, sin_TD), v, kv, layer, slots_T)
    return _rotate(q, cos_TD, sin_TD)


def _rotated(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    out = x_THD.clone(memory_format=torch.contiguous_format)
    code = DTYPE_CODE[out.dtype]
    library().pds_apply_rope(out.data_ptr(), cos_TD.data_ptr(), sin_TD.data_ptr(), *out.shape, code)
    return out


def _rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    x = x_THD.float()
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x * cos_TD[:, None, :] + turned * sin_TD[:, None, :]).to(x_THD.dtype)
