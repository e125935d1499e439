"""Attention over re-laid pages gives the bits of attention over the pages they came from, whatever the last
page and the memory behind it held: rows that nobody wrote are NaN here."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.plan import LayerKind, ReplicaLayout, compile_plan
from kvtransfer.relay import NativeRelayout
from pdserve.kernels.attention import paged_attention
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView, inner_layout, read_kv
from pdserve.kernels.write_kv import write_kv_reference
from tests.conformance.kernel_kit import SHAPES, both_dtypes, filled, make_kv, randn, tables

HEADS = SHAPES["smollm2-gqa"]


def layout_of(kv: KVView, window: int) -> ReplicaLayout:
    return ReplicaLayout(
        page_size=kv.page_size, head_dim=kv.head_dim, num_kv_heads=kv.num_kv_heads, dtype=kv.dtype,
        inner=inner_layout(kv.dtype), layers=(LayerKind(window=window),) * kv.num_layers,
        ranks=((range(kv.num_kv_heads),),),
    )  # fmt: skip


def address(kv: KVView, page: int) -> int:
    return kv.storage.data_ptr() + page * kv.page_stride * kv.storage.element_size()


def relay(source: KVView, pages: list[int], target: KVView, to: list[int], length: int, window: int) -> int:
    """Re-lays a sequence span by span; how many copies that took."""
    relayout = NativeRelayout(compile_plan(layout_of(source, window), layout_of(target, window)))
    span, done = relayout.plan.span_tokens, 0
    for first in range(0, length, span):
        n = min(span, length - first)
        done += relayout.execute(
            source_pages={
                (0, page): address(source, pages[first // source.page_size + page])
                for _, page in relayout.plan.source_pages(n)
            },
            target_pages={
                (0, page): address(target, to[first // target.page_size + page])
                for _, page in relayout.plan.target_pages(n)
            },
            num_tokens=n,
            tokens_after=length - first - n,
        )
    return done


def hand_over_row(source: KVView, slot: int, target: KVView, to_slot: int) -> None:
    """The next token's own K and V, which decode computes itself."""
    for layer in range(source.num_layers):
        k, v = read_kv(source, layer, torch.tensor([slot]))
        write_kv_reference(k, v, target, layer, torch.tensor([to_slot]))


@both_dtypes
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (48, 32)])
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("length", [15, 33, 163, 164, 320])
def test_the_next_token_sees_the_same(dtype: str, sizes: tuple[int, int], window: int, length: int) -> None:
    torch.manual_seed(7)
    source, pages = filled(dtype, HEADS, [length + 1], page_size=sizes[0])
    target, to = make_kv(dtype, HEADS, page_size=sizes[1]), tables([length + 1], sizes[1])
    relay(source, pages[0], target, to[0], length, window)
    metas = [
        AttentionMeta.build([1], [length + 1], table, page_size=size)
        for table, size in ((pages, sizes[0]), (to, sizes[1]))
    ]
    hand_over_row(source, int(metas[0].slots_T[0]), target, int(metas[1].slots_T[0]))
    q = randn(dtype, 1, HEADS.num_heads, HEADS.dim)
    for layer in (0, 1):
        ours, theirs = (
            paged_attention(q, kv, layer, meta, scale=0.125, window=window)
            for kv, meta in ((source, metas[0]), (target, metas[1]))
        )
        assert torch.isfinite(theirs).all()
        assert torch.equal(ours, theirs)


def test_rows_out_of_the_window_are_not_copied() -> None:
    source, pages = filled("float32", HEADS, [320])
    done = {}
    for window in (0, 37):
        target, to = make_kv("float32", HEADS, page_size=32), tables([320], 32)
        done[window] = relay(source, pages[0], target, to[0], 320, window)
    assert done[37] < done[0] / 4
