"""Attention over KV pages: one operator for prefill chunks, decode rows and steps that mix them.

A row's result is reduced in an order fixed by positions alone: it does not depend on the other rows, the
chunk it comes in, the page size, or the number of threads. KV is written before (`rope`, `write_kv`).

Over int8 pages both products are of bytes: q is quantised by (token, head), the softmax's weights times V's
scales by row and span of positions. So a weight is off by up to 1/510 of the greatest one in its span.

Legend: T tokens, H query heads, K KV heads (H is a multiple), D head dim, C context, S positions of a span.
"""

from __future__ import annotations

import math

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView, read_kv
from pdserve.kernels.native import DTYPE_CODE, check, library
from pdserve.kernels.write_kv import quantise_rows

SPAN = 256
"""Positions that share a running maximum, and a scale of weights (`kSpan` of csrc/paged.h)."""


def paged_attention(
    q_THD: torch.Tensor, kv: KVView, layer: int, meta: AttentionMeta, *, scale: float, window: int = 0
) -> torch.Tensor:
    """softmax(scale * q k^T) v, causal within each sequence, over the pages of `meta`; [T, H, D]. q has the
    pages' dtype, or either float type where they are int8.

    window: 0, or the number of last positions a token sees, itself included (Mistral's sliding window).
    Rows at or beyond a sequence's context are never looked at.
    Raises InternalError for a page outside the pool.
    """
    assert kv.dtype == "int8" or q_THD.dtype is kv.storage.dtype
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
    """Plain torch form of `paged_attention`, in float32; over int8 pages with the same roundings to codes."""
    out = torch.empty_like(q_THD)
    starts = meta.query_starts_B1.tolist()
    for seq, context in enumerate(meta.context_lens_B.tolist()):
        position_C = torch.arange(context)
        pages = meta.block_tables_BP[seq].long()
        slots = pages[position_C // kv.page_size] * kv.page_size + position_C % kv.page_size
        rows = slice(starts[seq], starts[seq + 1])
        attend = _attend_bytes if kv.dtype == "int8" else _attend
        k_CKD, v_CKD = (part.float() for part in read_kv(kv, layer, slots))
        out[rows] = attend(q_THD[rows].float(), k_CKD, v_CKD, scale, window).to(out.dtype)
    return out


def _attend(
    q_THD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    group = q_THD.shape[1] // k_CKD.shape[1]
    k_HCD = k_CKD.repeat_interleave(group, dim=1).transpose(0, 1)
    v_HCD = v_CKD.repeat_interleave(group, dim=1).transpose(0, 1)
    scores_HTC = torch.einsum("thd,hcd->htc", q_THD, k_HCD) * scale
    hidden_TC = _hidden(q_THD.shape[0], k_CKD.shape[0], window)
    weights_HTC = scores_HTC.masked_fill(hidden_TC, float("-inf")).softmax(dim=-1)
    return torch.einsum("htc,hcd->thd", weights_HTC, v_HCD)


def _hidden(tokens: int, context: int, window: int) -> torch.Tensor:
    """Which positions the last `tokens` of `context` do not see; bool [T, C]."""
    position_C = torch.arange(context)
    distance_TC = position_C[-tokens:, None] - position_C[None, :]
    hidden_TC = distance_TC < 0
    if window > 0:
        hidden_TC |= distance_TC >= window
    return hidden_TC


def _attend_bytes(
    q_THD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """As csrc/attention8.cpp does, up to roundings of floats: span by span, weights as codes in [0, 255]."""
    group = q_THD.shape[1] // k_CKD.shape[1]
    q_codes_THD, q_scale_TH = quantise_rows(q_THD)
    # Rows of pages come as codes times scales: quantising them again gives the same codes.
    k_codes, k_scales = quantise_rows(k_CKD.repeat_interleave(group, dim=1))
    v_codes, v_scales = quantise_rows(v_CKD.repeat_interleave(group, dim=1))
    scores_HTC = torch.einsum("thd,chd->htc", q_codes_THD, k_codes) * k_scales.t()[:, None]
    scores_HTC = scores_HTC * (q_scale_TH * scale * math.log2(math.e)).t()[..., None]
    hidden_TC = _hidden(q_THD.shape[0], k_CKD.shape[0], window)
    top_HT = torch.full_like(scores_HTC[..., 0], -1e30)
    totals_HT, sums_HTD = torch.zeros_like(top_HT), torch.zeros_like(q_THD.transpose(0, 1))
    for span in range(0, k_CKD.shape[0], SPAN):
        at = slice(span, span + SPAN)
        before_HT = top_HT
        scores_HTS = scores_HTC[..., at].masked_fill(hidden_TC[:, at], float("-inf"))
        top_HT = torch.maximum(before_HT, scores_HTS.amax(dim=-1).ceil())
        rescale_HT = torch.exp2(before_HT - top_HT)
        weights_HTS = torch.exp2((scores_HTS - top_HT[..., None]).clamp_min(-64)).masked_fill(
            hidden_TC[:, at], 0
        )
        totals_HT = totals_HT * rescale_HT + weights_HTS.sum(dim=-1)
        scaled_HTS = weights_HTS * v_scales[at].t()[:, None]
        step_HT1 = scaled_HTS.amax(dim=-1, keepdim=True) / 255
        codes_HTS = (scaled_HTS / step_HT1).nan_to_num(0).round()
        sums_HTD = sums_HTD * rescale_HT[..., None] + step_HT1 * torch.einsum(
            "hts,shd->htd", codes_HTS, v_codes[at]
        )
    return (sums_HTD / totals_HT[..., None]).transpose(0, 1)
