"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over pages of latent rows.

What lives here: writing a step's latent rows and attending over them with absorbed queries. What does not:
the projections around it (`pdserve.layers.latent`), pages of keys and values (`kv_view`, `attention`).

Each position has one row of C = rank + rope elements, shared by all heads: the normed latent, then the
rotated key. It is the key of every head's absorbed query, and its first `rank` elements are the value.

Legend: T tokens, H query heads, C elements of a row, R rank.
"""

from __future__ import annotations

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.native import DTYPE_CODE, check, library


def write_latent(rows_TC: torch.Tensor, kv: KVView, layer: int, slots_T: torch.Tensor) -> None:
    """Write row t to slots_T[t] (int32; page * page_size + row) of a layer of a latent view.

    Slots must differ from each other. Raises InternalError for a slot outside the pool.
    """
    assert kv.latent
    assert rows_TC.dtype is kv.storage.dtype
    assert rows_TC.shape[1] == kv.latent_width
    assert slots_T.dtype is torch.int32
    rows_TC = rows_TC.contiguous()
    check(
        library().pds_write_latent(
            kv.native,
            rows_TC.data_ptr(),
            layer,
            slots_T.data_ptr(),
            rows_TC.shape[0],
            DTYPE_CODE[rows_TC.dtype],
        )
    )


def write_latent_reference(rows_TC: torch.Tensor, kv: KVView, layer: int, slots_T: torch.Tensor) -> None:
    """Plain torch form of `write_latent`."""
    slots = slots_T.long()
    kv.latent_part(layer)[slots // kv.page_size, slots % kv.page_size] = rows_TC


def latent_attention(
    q_HTC: torch.Tensor, kv: KVView, layer: int, meta: AttentionMeta, *, rank: int, scale: float
) -> torch.Tensor:
    """Causal attention of every row over its own sequence: [H, T, R] in q's dtype, summed in float32.

    A row's result depends on its query and its sequence's latent rows alone, in one fixed order.
    Raises InternalError for a page outside the pool.
    """
    assert kv.latent
    assert q_HTC.dtype is kv.storage.dtype
    assert q_HTC.shape[2] == kv.latent_width
    q_HTC = q_HTC.contiguous()
    heads, tokens, _ = q_HTC.shape
    out_HTR = torch.empty(heads, tokens, rank, dtype=q_HTC.dtype)
    status = library().pds_latent_attention(
        out_HTR.data_ptr(), q_HTC.data_ptr(), kv.native, layer, meta.native, heads, rank, scale,
        DTYPE_CODE[q_HTC.dtype],
    )  # fmt: skip
    check(status)
    return out_HTR


def latent_attention_reference(
    q_HTC: torch.Tensor, kv: KVView, layer: int, meta: AttentionMeta, *, rank: int, scale: float
) -> torch.Tensor:
    """Plain torch form of `latent_attention`."""
    latent_PSC = kv.latent_part(layer)
    starts, out = meta.query_starts_B1.tolist(), torch.empty(*q_HTC.shape[:2], rank, dtype=q_HTC.dtype)
    for b, context in enumerate(meta.context_lens_B.tolist()):
        begin, end = starts[b], starts[b + 1]
        rows_SC = latent_PSC[meta.block_tables_BP[b].long()].flatten(0, 1)[:context].float()
        scores = q_HTC[:, begin:end].float() @ rows_SC.T * scale
        first = context - (end - begin)
        visible = torch.arange(context) <= first + torch.arange(end - begin)[:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[:, begin:end] = (weights @ rows_SC[:, :rank]).to(out.dtype)
    return out
