"""Attention as workers with `--kv-dtype int8` compute it: the kernels themselves, over pages of one sequence.

What lives here: the way from plain tensors into pages and back, for measuring quality. What does not: the
kernels (`pdserve.kernels`), what their numbers mean (`quality`).

Legend: B sequences, T tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch

from pdserve.kernels.attention import paged_attention
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.write_kv import write_kv
from pdserve.kvcache.layout import INT8, PageLayout, pages_for

PAGE_SIZE = 16


def attend_int8(q_BTHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """An `Attend` (`forward`) over int8 pages: k, v, q and the softmax's weights are rounded."""
    rows = zip(q_BTHD, k, v, strict=True)
    return torch.stack([_attend_one(q_THD, k_TKD, v_TKD, window) for q_THD, k_TKD, v_TKD in rows])


def _attend_one(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, window: int) -> torch.Tensor:
    tokens, num_kv_heads, head_dim = k_TKD.shape
    pages = pages_for(tokens, PAGE_SIZE)
    layout = PageLayout(
        num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=PAGE_SIZE, dtype=INT8, inner=""
    )
    kv = KVView(
        storage=torch.zeros(pages * layout.page_bytes, dtype=torch.uint8), page_stride=layout.page_bytes,
        num_pages=pages, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=PAGE_SIZE,
        dtype=INT8,
    )  # fmt: skip
    meta = AttentionMeta.build([tokens], [tokens], [list(range(pages))], page_size=PAGE_SIZE)
    write_kv(k_TKD, v_TKD, kv, 0, meta.slots_T)
    return paged_attention(q_THD, kv, 0, meta, scale=head_dim**-0.5, window=window)
