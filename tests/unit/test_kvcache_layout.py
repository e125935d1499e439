"""Sizes of pages, the field's KV formula, and fingerprints."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.kvcache.layout import PageLayout, kv_bytes, pages_for
from pdserve.kvcache.pool import KVPool

SMOL = PageLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16", inner="rows")


def test_a_page_of_smollm2_takes_what_the_design_says() -> None:
    assert SMOL.page_bytes == 360 * 1024
    assert SMOL.stride_bytes == SMOL.page_bytes


def test_a_page_of_bytes_has_a_scale_for_each_token_and_head() -> None:
    pages = dataclasses.replace(SMOL, dtype="int8")
    assert pages.part_bytes == 3 * 16 * (64 + 4)
    assert pages.page_bytes == 30 * 2 * pages.part_bytes == SMOL.page_bytes * 68 // 128
    assert pages.stride_bytes == 192 * 1024
    pool = KVPool.create(pages, 3, 1)
    try:
        assert len(pool.page_view(2)) == pages.page_bytes
        pool.storage.fill_(7)
        pool.copy_page(1, 2)
        pool.zero(1)
        assert set(pool.page_view(1)) == {0}
        assert set(pool.page_view(2)) == set(pool.page_view(0)) == {7}
    finally:
        pool.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("num_layers", [1, 5])
def test_the_formula_is_what_the_pool_really_holds(dtype: str, page_size: int, num_layers: int) -> None:
    layout = PageLayout(
        num_layers=num_layers, num_kv_heads=3, head_dim=20, page_size=page_size, dtype=dtype, inner="rows"
    )
    length, num_pages = 96, pages_for(96, page_size)
    want = kv_bytes(
        batch=1,
        length=length,
        num_layers=num_layers,
        num_kv_heads=3,
        head_dim=20,
        dtype_bytes=layout.dtype_bytes,
    )
    pool = KVPool.create(layout, num_pages, 1)
    try:
        assert sum(len(pool.page_view(page)) for page in range(num_pages)) == want
        assert pool.storage.nbytes == num_pages * layout.stride_bytes
        assert 0 <= layout.stride_bytes - layout.page_bytes < 4096
        assert layout.stride_bytes % 4096 == 0
    finally:
        pool.close()


def test_the_formula_scales_with_the_batch() -> None:
    one = kv_bytes(batch=1, length=10, num_layers=2, num_kv_heads=3, head_dim=4, dtype_bytes=2)
    assert one == 1 * 2 * 3 * 4 * 2 * 2 * 10
    assert kv_bytes(batch=7, length=10, num_layers=2, num_kv_heads=3, head_dim=4, dtype_bytes=2) == 7 * one


@pytest.mark.parametrize(("rows", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_rounds_up(rows: int, pages: int) -> None:
    assert pages_for(rows, 16) == pages


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 29},
        {"num_kv_heads": 4},
        {"head_dim": 32},
        {"page_size": 32},
        {"dtype": "float32"},
        {"inner": "k"},
    ],
)
def test_every_field_is_in_the_fingerprint(change: dict[str, object]) -> None:
    assert dataclasses.replace(SMOL, **change).fingerprint() != SMOL.fingerprint()  # type: ignore[arg-type]
    assert dataclasses.replace(SMOL).fingerprint() == SMOL.fingerprint()


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"page_size": -1}, {"dtype": "int4"}])
def test_sizes_that_make_no_page_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(SMOL, **change)  # type: ignore[arg-type]
