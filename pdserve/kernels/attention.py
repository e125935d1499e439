"""Attention over KV pages: one operator for prefill chunks, decode rows and steps that mix them.

A row's result is reduced in an order fixed by positions alone: it does not depend on the other rows, the
chunk it comes in, the page size, or the number of threads. KV is written before (`rope`, `write_kv`).

Legend: T tokens, H query heads, K KV heads (H is a multiple), D head dim, C context.
"""

from __future__ import annotations

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView, read_kv
from pdserve.kernels.native import DTYPE_CODE, check, library


def paged_attention(
    q_THD: torch.Tensor, kv: KVView, layer: int, meta: AttentionMeta, *, scale: float, window: int = 0
) -> torch.Tensor:
    """softmax(scale * q k^T) v, causal within each sequence, over the pages of `meta`; [T, H, D].

    window: 0, or the number of last positions a token sees, itself included (Mistral's sliding window).
    Rows at or beyond a sequence's context are never looked at.
    Raises InternalError for a page outside the pool.
    """
    assert q_THD.dtype is kv.storage.dtype
    q_THD = q_THD.contiguous()
    out = torch.empty_like(q_THD)
    status = library().pds_paged_attention(
        out.data_ptr(), q_THD.data_ptr(), kv.native, layer, meta.native, q_THD.shape[1], scale, window,
        DTYPE_CODE[q_THD.dtype],
    )  # fmt: skip
    check(status)
    return out


def paged_attention_reference(
    q_THD: torch.Tensor, kv: KVView, layer: int, meta: AttentionMeta, *, scale: float, window: int = 0
) -> torch.Tensor:
    """Plain torch form of `paged_attention`, in float32."""
    out = torch.empty_like(q_THD)
    starts = meta.query_starts_B1.tolist()
    for seq, context in enumerate(meta.context_lens_B.tolist()):
        position_C = torch.arange(context)
        pages = meta.block_tables_BP[seq].long()
        slots = pages[position_C // kv.page_size] * kv.page_size + position_C % kv.page_size
        k_CKD, v_CKD = (part.float() for part in read_kv(kv, layer, slots))
        rows = slice(starts[seq], starts[seq + 1])
        out[rows] = _attend(q_THD[rows].float(), k_CKD, v_CKD, scale, window).to(out.dtype)
    return out


def _attend(
    q_THD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    group = q_THD.shape[1] // k_CKD.shape[1]
    k_HCD = k_CKD.repeat_interleave(group, dim=1).transpose(0, 1)
    v_HCD = v_CKD.repeat_interleave(group, dim=1).transpose(0, 1)
    position_C = torch.arange(k_CKD.shape[0])
    distance_TC = position_C[-q_THD.shape[0] :, None] - position_C[None, :]
    hidden_TC = distance_TC < 0
    if window > 0:
        hidden_TC |= distance_TC >= window
    scores_HTC = torch.einsum("thd,hcd->htc", q_THD, k_HCD) * scale
    weights_HTC = scores_HTC.masked_fill(hidden_TC, float("-inf")).softmax(dim=-1)
    return torch.einsum("htc,hcd->thd", weights_HTC, v_HCD)
