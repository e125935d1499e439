"""The Triton kernels against plain forms, for a process with TRITON_INTERPRET=1 in its environment.

    python -m tests.support.triton_cases        prints one JSON object: by case, what went wrong

Pages are written and read by the CPU kernels' plain forms: their layouts agree or a case fails.

Legend: M rows, G groups, N outputs, K inputs, B sequences, H query heads, D head dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch

from pdserve.kernels.attention import paged_attention_reference
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.triton.grouped_linear import grouped_linear, grouped_linear_reference
from pdserve.kernels.triton.page_copy import copy_pages, copy_pages_reference
from pdserve.kernels.triton.paged_attention import (
    Pages,
    paged_attention_decode,
    paged_attention_decode_reference,
)
from tests.conformance.kernel_kit import DTYPES, Heads, filled, randn

BOUND = {"float32": 1e-5, "bfloat16": 2**-7}
"""Of the largest value. The interpreter cuts bfloat16 off where a GPU rounds: twice the CPU's bound."""
Case = Callable[[], str | None]
SIZES = {
    "decode": [1, 0, 2, 3, 0, 1],
    "all to one": [0, 70],
    "none": [0, 0],
    "one": [3],
    "prefill": [40, 0, 90],
}


def near(got: torch.Tensor, wanted: torch.Tensor, dtype: str) -> str | None:
    """Nothing, or how far off."""
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if got.numel() == 0:
        return None
    off = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-3)
    return None if bool(off <= BOUND[dtype]) else f"off by {off:.3g}"


def offsets_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def grouped(dtype: str, sizes: list[int], num_out: int, num_in: int) -> str | None:
    x_MK, weights_GNK = randn(dtype, sum(sizes), num_in), randn(dtype, len(sizes), num_out, num_in)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    exact = torch.einsum("mk,mnk->mn", x_MK.double(), weights_GNK.double()[group])
    offsets_G = offsets_of(sizes)
    plain = grouped_linear_reference(x_MK, offsets_G, weights_GNK)
    sums = grouped_linear(x_MK, offsets_G, weights_GNK, out_float32=True)
    told = near(plain, exact, dtype) or near(sums, exact, "float32")
    return told or near(grouped_linear(x_MK, offsets_G, weights_GNK), exact, dtype)


def grouped_alone(dtype: str) -> str | None:
    """Batch-invariant: a row's bits with and without neighbours."""
    x_MK, weights_GNK = randn(dtype, 60, 96), randn(dtype, 2, 40, 96)
    many = grouped_linear(x_MK, offsets_of([20, 40]), weights_GNK, batch_invariant=True)
    one = grouped_linear(x_MK[20:21], offsets_of([0, 1]), weights_GNK, batch_invariant=True)
    return None if torch.equal(many[20:21], one) else "a row depends on its neighbours"


def pages_of(kv: KVView) -> Pages:
    return Pages(
        storage=kv.storage, page_stride=kv.page_stride, num_kv_heads=kv.num_kv_heads, head_dim=kv.head_dim,
        page_size=kv.page_size,
    )  # fmt: skip


def attention(dtype: str, heads: Heads, lens: list[int], page_size: int, window: int) -> str | None:
    kv, tables = filled(dtype, heads, lens, page_size=page_size)
    meta = AttentionMeta.build([1] * len(lens), lens, tables, page_size=page_size)
    q_BHD, scale = randn(dtype, len(lens), heads.num_heads, heads.dim), heads.dim**-0.5
    wanted = paged_attention_reference(q_BHD.float(), kv, 1, meta, scale=scale, window=window)
    for op in (paged_attention_decode_reference, paged_attention_decode):
        got = op(
            q_BHD, pages_of(kv), 1, meta.block_tables_BP, meta.context_lens_B, scale=scale, window=window
        )
        if told := near(got, wanted, dtype):
            return f"{op.__name__}: {told}"
    alone = paged_attention_decode(
        q_BHD[-1:], pages_of(kv), 1, meta.block_tables_BP[-1:], meta.context_lens_B[-1:], scale=scale,
        window=window,
    )  # fmt: skip
    return None if torch.equal(alone, got[-1:]) else "a row depends on its neighbours"


def copies() -> str | None:
    source = torch.randint(0, 255, (9, 4096 * 5 + 64), dtype=torch.uint8)
    to = torch.zeros(7, 4096 * 5 + 128, dtype=torch.uint8)
    wanted, pages, to_pages = to.clone(), torch.tensor([8, 0, 3]), torch.tensor([2, 6, 1], dtype=torch.int32)
    copy_pages(to, to_pages, source, pages, 4096 * 5 + 4)
    copy_pages_reference(wanted, to_pages, source, pages, 4096 * 5 + 4)
    copy_pages(to, to_pages[:0], source, pages[:0], 64)
    return None if torch.equal(to, wanted) else "other bytes"


def cases() -> Iterator[tuple[str, Case]]:
    """All of them, by name."""
    for dtype in DTYPES:
        for name, sizes in SIZES.items():
            for num_out, num_in in ((64, 64), (33, 50)):
                yield (
                    f"grouped {dtype} {name} {num_out}x{num_in}",
                    lambda d=dtype, s=sizes, n=num_out, k=num_in: grouped(d, s, n, k),
                )
        yield f"grouped {dtype} alone", lambda d=dtype: grouped_alone(d)
        for heads in (
            Heads(num_heads=9, num_kv_heads=3, dim=64),
            Heads(num_heads=4, num_kv_heads=1, dim=128),
        ):
            for lens, page_size, window in (([1, 33, 17], 16, 0), ([530, 2], 32, 0), ([50, 600], 48, 37)):
                yield (
                    f"attention {dtype} {heads.dim} {lens} {page_size} {window}",
                    lambda d=dtype, h=heads, c=lens, s=page_size, w=window: attention(d, h, c, s, w),
                )
    yield "copies", copies


def main() -> int:
    """Prints by case what went wrong, null where nothing did."""
    torch.set_num_threads(1)
    told = {}
    for name, case in cases():
        torch.manual_seed(7)
        told[name] = case()
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
