"""Pages copied between pools on a GPU, or within one: for pages written anew, staging and taking in.

What lives here: one Triton kernel, its typed wrapper, and a plain form. What does not: which pages
(`pdserve.kvcache`), other layouts (`kvtransfer`'s re-layout).

Legend: P pages to copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _copy_kernel(to, source, to_pages, pages, to_stride, stride, words, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(pages + pair).to(tl.int64) * stride
    to_begin = tl.load(to_pages + pair).to(tl.int64) * to_stride
    tl.store(to + to_begin + at, tl.load(source + begin + at, mask=at < words), mask=at < words)


def copy_pages(
    to: torch.Tensor, to_pages_P: torch.Tensor, source: torch.Tensor, pages_P: torch.Tensor, page_bytes: int
) -> None:
    """Copies the bytes of page pages_P[i] of source into page to_pages_P[i] of to.

    to, source: uint8 [pages, stride], contiguous, 4-byte aligned, strides multiples of 4. to_pages_P,
    pages_P: int32 or int64. No page is written twice, and none is both read and written. page_bytes: a
    multiple of 4.
    """
    assert page_bytes % 4 == 0
    assert page_bytes <= min(to.shape[1], source.shape[1])
    assert to_pages_P.shape == pages_P.shape
    if pages_P.numel() == 0:
        return
    to_words, words = to.view(torch.int32), source.view(torch.int32)
    grid = (pages_P.numel(), triton.cdiv(page_bytes // 4, BLOCK))
    _copy_kernel[grid](
        to_words,
        words,
        to_pages_P,
        pages_P,
        to_words.stride(0),
        words.stride(0),
        page_bytes // 4,
        BLOCK=BLOCK,
    )


def copy_pages_reference(
    to: torch.Tensor, to_pages_P: torch.Tensor, source: torch.Tensor, pages_P: torch.Tensor, page_bytes: int
) -> None:
    """Plain torch form of `copy_pages`."""
    to[to_pages_P.long(), :page_bytes] = source[pages_P.long(), :page_bytes]
