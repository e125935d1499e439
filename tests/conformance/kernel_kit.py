"""What the kernel suites share: shapes, random pages, bounds. No tests here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.write_kv import write_kv_reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOUND = {"float32": 1e-5, "bfloat16": 2**-8}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def randn(dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPES[dtype])


def assert_near(got: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    """Within BOUND of the largest value of `wanted` (float32 or float64)."""
    scale = wanted.abs().max().clamp_min(1e-3)
    assert torch.isfinite(got).all()
    assert ((got.double() - wanted.double()).abs().max() / scale).item() <= BOUND[dtype]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    dim: int


SHAPES = {
    "smollm2-gqa": Heads(num_heads=9, num_kv_heads=3, dim=64),
    "mha": Heads(num_heads=4, num_kv_heads=4, dim=32),
    "mqa": Heads(num_heads=8, num_kv_heads=1, dim=128),
    "wide-group": Heads(num_heads=40, num_kv_heads=2, dim=16),
    "tiny": Heads(num_heads=6, num_kv_heads=2, dim=8),
    "odd-dim": Heads(num_heads=2, num_kv_heads=2, dim=90),
    "dim-256": Heads(num_heads=2, num_kv_heads=1, dim=256),
}
every_shape = pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES.keys())


def make_kv(dtype: str, heads: Heads, *, page_size: int = 16, num_pages: int = 64, layers: int = 2) -> KVView:
    page = layers * 2 * heads.num_kv_heads * heads.dim * page_size
    stride = page + 64
    # Rows that nobody wrote must not matter, so they start as NaN.
    storage = torch.full((num_pages * stride,), float("nan"), dtype=DTYPES[dtype])
    return KVView(
        storage=storage, page_stride=stride, num_pages=num_pages, num_layers=layers,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.dim, page_size=page_size, dtype=dtype,
    )  # fmt: skip


def tables(lens: list[int], page_size: int, num_pages: int = 64) -> list[list[int]]:
    """Disjoint pages for sequences of so many tokens, in no order."""
    pages = torch.randperm(num_pages).tolist()
    return [[pages.pop() for _ in range(-(-length // page_size))] for length in lens]


def filled(
    dtype: str, heads: Heads, lens: list[int], *, page_size: int = 16
) -> tuple[KVView, list[list[int]]]:
    """Pages that hold random K and V of sequences of so many tokens, the same for every page size."""
    kv, pages = make_kv(dtype, heads, page_size=page_size), tables(lens, page_size)
    slots = AttentionMeta.build(lens, lens, pages, page_size=page_size).slots_T
    generator = torch.Generator().manual_seed(11)
    rows = torch.randn(2, sum(lens), heads.num_kv_heads, heads.dim, generator=generator).to(DTYPES[dtype])
    for layer in range(kv.num_layers):
        write_kv_reference(rows[0] * (layer + 1), rows[1] + layer, kv, layer, slots)
    return kv, pages


def one_token_over(pages: list[int]) -> AttentionMeta:
    """The last of 20 positions of a sequence on these pages, whatever they are."""
    return AttentionMeta(
        query_starts_B1=torch.tensor([0, 1], dtype=torch.int32),
        context_lens_B=torch.tensor([20], dtype=torch.int32),
        block_tables_BP=torch.tensor([pages], dtype=torch.int32),
        positions_T=torch.tensor([19], dtype=torch.int32),
        slots_T=torch.tensor([0], dtype=torch.int32),
    )
