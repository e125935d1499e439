"""Latent attention's kernels: against float64 and plain forms, over pages, chunks and neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.errors import ConfigError, InternalError
from pdserve.kernels import native
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.latent import (
    latent_attention,
    latent_attention_reference,
    write_latent,
    write_latent_reference,
)
from tests.conformance.kernel_kit import DTYPES, assert_near, both_dtypes, randn, tables

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]
RANK, WIDTH, HEADS, SCALE = 72, 90, 3, 0.2
OPS: dict[str, dict[str, Callable[..., Any]]] = {
    "write_latent": {"native": write_latent, "reference": write_latent_reference},
    "latent_attention": {"native": latent_attention, "reference": latent_attention_reference},
}


def implementations(op: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("impl", OPS[op].values(), ids=OPS[op].keys())


def view(dtype: str, page_size: int = 16, num_pages: int = 64) -> KVView:
    stride = 2 * page_size * WIDTH + 64
    # Rows that nobody wrote must not matter, so they start as NaN.
    storage = torch.full((num_pages * stride,), float("nan"), dtype=DTYPES[dtype])
    return KVView(
        storage=storage, page_stride=stride, num_pages=num_pages, num_layers=2, num_kv_heads=1,
        head_dim=WIDTH // 2, page_size=page_size, dtype=dtype, latent=True,
    )  # fmt: skip


def filled(dtype: str, rows: list[torch.Tensor], page_size: int = 16) -> tuple[KVView, list[list[int]]]:
    """Layer 1 holds each sequence's rows, in pages of no order."""
    kv, lens = view(dtype, page_size), [len(r) for r in rows]
    pages = tables(lens, page_size)
    write_latent(torch.cat(rows), kv, 1, AttentionMeta.build(lens, lens, pages, page_size=page_size).slots_T)
    return kv, pages


@both_dtypes
@implementations("write_latent")
def test_written_rows_lie_where_they_should(impl: Callable[..., Any], dtype: str) -> None:
    kv = view(dtype, num_pages=8)
    kv.storage.zero_()
    slots, rows = torch.randperm(8 * 16)[:70].int(), randn(dtype, 70, WIDTH)
    impl(rows, kv, 1, slots)
    assert torch.equal(kv.latent_part(1)[slots.long() // 16, slots.long() % 16], rows)
    assert int(kv.storage.count_nonzero()) == int(rows.count_nonzero())


@both_dtypes
@pytest.mark.parametrize("page_size", [16, 48])
@implementations("latent_attention")
def test_against_float64(impl: Callable[..., Any], dtype: str, page_size: int) -> None:
    lens, queries = [1, 40, 33, 100], [1, 40, 1, 17]
    rows = [randn(dtype, n, WIDTH) for n in lens]
    kv, pages = filled(dtype, rows, page_size)
    q = randn(dtype, HEADS, sum(queries), WIDTH)
    meta = AttentionMeta.build(queries, lens, pages, page_size=page_size)
    got, at = impl(q, kv, 1, meta, rank=RANK, scale=SCALE), 0
    assert (got.shape, got.dtype) == ((HEADS, sum(queries), RANK), q.dtype)
    for length, count, keys in zip(lens, queries, rows, strict=True):
        for i in range(count):
            seen = keys[: length - count + i + 1].double()
            weights = (q[:, at].double() @ seen.T * SCALE).softmax(-1)
            assert_near(got[:, at], weights @ seen[:, :RANK], dtype)
            at += 1


@both_dtypes
def test_a_row_does_not_depend_on_pages_chunks_threads_or_neighbours(dtype: str) -> None:
    rows, q = randn(dtype, 60, WIDTH), randn(dtype, HEADS, 60, WIDTH)
    kv, pages = filled(dtype, [rows])
    whole = latent_attention(
        q, kv, 1, AttentionMeta.build([60], [60], pages, page_size=16), rank=RANK, scale=SCALE
    )
    others = [randn(dtype, n, WIDTH) for n in (5, 77)]
    kv, pages = filled(dtype, [others[0], rows, others[1]], 32)
    for threads, begin, end in ((1, 0, 60), (3, 0, 17), (2, 59, 60), (3, 17, 59)):
        native.set_num_threads(threads)
        meta = AttentionMeta.build([2, end - begin, 1], [5, end, 77], pages, page_size=32)
        more = torch.cat([randn(dtype, HEADS, 2, WIDTH), q[:, begin:end], randn(dtype, HEADS, 1, WIDTH)], 1)
        got = latent_attention(more, kv, 1, meta, rank=RANK, scale=SCALE)
        assert torch.equal(got[:, 2:-1], whole[:, begin:end])


def test_what_lies_outside_the_pool_is_refused() -> None:
    kv = view("float32", num_pages=4)
    for slot in (-1, 64, 2**31 - 1):
        with pytest.raises(InternalError):
            write_latent(torch.zeros(1, WIDTH), kv, 0, torch.tensor([slot], dtype=torch.int32))
    meta = AttentionMeta.build([1], [20], [[3, 4]], page_size=16)
    with pytest.raises(InternalError):
        latent_attention(torch.zeros(HEADS, 1, WIDTH), kv, 0, meta, rank=RANK, scale=SCALE)


def test_a_view_has_one_row_of_bounded_width() -> None:
    good: dict[str, Any] = {
        "page_stride": 512, "num_pages": 8, "num_layers": 1, "num_kv_heads": 1, "head_dim": 16,
        "page_size": 16, "dtype": "float32", "latent": True,
    }  # fmt: skip
    storage = torch.zeros(8 * 512)
    assert KVView(storage=storage, **good).latent_part(0).shape == (8, 16, 32)
    for wrong in ({"num_kv_heads": 2, "head_dim": 8}, {"head_dim": 4096}):
        with pytest.raises(ConfigError, match="latent row"):
            KVView(storage=storage, **{**good, **wrong})
