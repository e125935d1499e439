"""Attention of decode rows over KV pages on a GPU: one query row per sequence, grouped query heads.

What lives here: two Triton kernels (parts of a context, and their sum), the typed wrapper, and a plain form.
What does not: prefill chunks, writing KV, the page's layout (`pdserve.kernels.kv_view`, which is read here as
it is on the CPU: pages move between both unchanged).

    float32   K [K, D, S]        V [K, S, D]
    bfloat16  K [K, D/2, S, 2]   V [K, S/2, D, 2]     read as words of two: K's hold two dims of a position,
                                                      V's two positions of a dim; neighbours lie side by side

A context is cut at multiples of PART positions counted from its start, and the parts are summed in order: a
row's result depends on its own context alone, not on its neighbours, and long contexts fill the GPU.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867) for the running maximum; Dao et al. 2023
(Flash-Decoding) for parts of a context.

Legend: B sequences, H query heads, K KV heads, G query heads of a KV head (padded to 16 at least), D head
dim, S page size, P pages of the longest block table, C context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdserve.kernels.triton.products import INTERPRETED, dot

PART = 512
"""Positions of a part: its sums, 4 (D + 2) bytes per query head, are few beside its keys and values."""
BLOCK = 64
HEAD_DIMS = (64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """A pool's page area on a device. storage: 1-D, bfloat16 or float32; page_stride: elements from one page
    to the next; see `pdserve.kernels.kv_view.KVView`, whose layout it is. Offset 0 is page 0, layer 0.
    """

    storage: torch.Tensor
    page_stride: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def part_elems(self) -> int:
        """Elements of one layer's K (or V) in a page."""
        return self.num_kv_heads * self.head_dim * self.page_size

    @property
    def paired(self) -> bool:
        """Whether elements lie in pairs."""
        return self.storage.dtype is torch.bfloat16


@triton.jit
def _halves(words):
    """The two bfloat16 of each word: (the first ones, the second ones)."""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit(do_not_specialize=["window", "max_pages", "num_parts"])
def _part_kernel(
    part_out, part_max, part_sum, q, kv, block_tables, context_lens,
    scale, window, page_stride, k_offset, v_offset, max_pages, num_heads, num_parts,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context = tl.load(context_lens + seq)
    begin = part * PART
    seen = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    end = tl.minimum(begin + PART, context)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM)
    head = kv_head * GROUP + g
    row = seq.to(tl.int64) * num_heads + head
    acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    if PAIRED:
        half = tl.arange(0, DIM // 2)
        q_at = q + row[:, None] * DIM + 2 * half[None, :]
        q_low = tl.load(q_at, mask=(g < GROUP)[:, None], other=0.0)
        q_high = tl.load(q_at + 1, mask=(g < GROUP)[:, None], other=0.0)
    else:
        q_GD = tl.load(q + row[:, None] * DIM + d[None, :], mask=(g < GROUP)[:, None], other=0.0)
    for at in range(begin, end, BLOCK):
        pos = at + tl.arange(0, BLOCK)
        # Masks that hold for whole pages, so that neighbours in a page are loaded together. The rest of the
        # table's pages are of the pool: their rows may be anything, even not a number, and are masked later.
        in_table = pos // PAGE < max_pages
        page = tl.load(block_tables + seq.to(tl.int64) * max_pages + pos // PAGE, mask=in_table, other=0)
        base = page.to(tl.int64) * page_stride
        live = (pos < end) & (pos >= seen)
        if PAIRED:
            k_at = base[None, :] + k_offset + kv_head * (DIM // 2 * PAGE) + half[:, None] * PAGE
            k_low, k_high = _halves(tl.load(kv + k_at + (pos % PAGE)[None, :]))
            scores = dot(q_low, k_low, tl.zeros((GROUP_PAD, BLOCK), tl.float32), WIDEN)
            scores = dot(q_high, k_high, scores, WIDEN)
        else:
            k_at = base[None, :] + k_offset + kv_head * (DIM * PAGE) + d[:, None] * PAGE
            k_DC = tl.load(kv + k_at + (pos % PAGE)[None, :])
            scores = dot(q_GD, k_DC, tl.zeros((GROUP_PAD, BLOCK), tl.float32), WIDEN)
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Nothing seen so far: any finite number will do, all weights are zero.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if PAIRED:
            # Words of V hold two positions, which are live together or not: a page has an even number, and
            # the odd one after the context's end has weight zero and is masked below.
            two = tl.arange(0, BLOCK // 2)
            pair = at + 2 * two
            in_table = pair // PAGE < max_pages
            page2 = tl.load(
                block_tables + seq.to(tl.int64) * max_pages + pair // PAGE, mask=in_table, other=0
            )
            v_at = page2.to(tl.int64) * page_stride + v_offset + kv_head * (PAGE // 2 * DIM)
            v_at = v_at + pair % PAGE // 2 * DIM
            words = tl.load(kv + v_at[:, None] + d[None, :], mask=(pair < end)[:, None], other=0)
            v_low, v_high = _halves(words)
            v_low = tl.where((pair >= seen)[:, None], v_low, 0.0)
            v_high = tl.where(((pair + 1 < end) & (pair + 1 >= seen))[:, None], v_high, 0.0)
            even, odd = tl.split(tl.reshape(weights.to(tl.bfloat16), (GROUP_PAD, BLOCK // 2, 2)))
            acc = dot(even, v_low.to(tl.bfloat16), acc, WIDEN)
            acc = dot(odd, v_high.to(tl.bfloat16), acc, WIDEN)
        else:
            v_at = base + v_offset + kv_head * (PAGE * DIM) + pos % PAGE * DIM
            v_CD = tl.load(kv + v_at[:, None] + d[None, :], mask=live[:, None], other=0.0)
            acc = dot(weights, v_CD, acc, WIDEN)
        top = new_top
    spot = (row * num_parts + part).to(tl.int64)
    tl.store(part_out + spot[:, None] * DIM + d[None, :], acc, mask=(g < GROUP)[:, None])
    tl.store(part_max + spot, top, mask=g < GROUP)
    tl.store(part_sum + spot, total, mask=g < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def _sum_kernel(
    out, part_out, part_max, part_sum, context_lens, num_heads, num_parts,
    DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    row = seq.to(tl.int64) * num_heads + tl.program_id(1)
    d = tl.arange(0, DIM)
    parts = tl.cdiv(tl.load(context_lens + seq), PART)
    acc = tl.zeros((DIM,), tl.float32)
    top = float("-inf")
    total = 0.0
    for part in range(0, parts):
        spot = row * num_parts + part
        new = tl.load(part_max + spot)
        new_top = tl.maximum(top, new)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - shift)
        share = tl.exp2(new - shift)
        total = total * fade + tl.load(part_sum + spot) * share
        acc = acc * fade + tl.load(part_out + spot * DIM + d) * share
        top = new_top
    tl.store(out + row * DIM + d, (acc / total).to(out.dtype.element_ty))


def paged_attention_decode(
    q_BHD: torch.Tensor,
    pages: Pages,
    layer: int,
    block_tables_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of each sequence's last position; [B, H, D] in q's dtype.

    q_BHD: bfloat16 or float32, the pages' dtype. block_tables_BP: int32, pages in order of position, those of
    the pool. context_lens_B: int32, from 1 to P * page_size; rows beyond are never looked at. window: 0, or
    the number of last positions that are seen.
    """
    sequences, heads, dim = q_BHD.shape
    assert q_BHD.dtype is pages.storage.dtype
    assert dim == pages.head_dim
    assert dim in HEAD_DIMS
    assert heads % pages.num_kv_heads == 0
    assert block_tables_BP.dtype is torch.int32
    assert context_lens_B.dtype is torch.int32
    assert not pages.paired or pages.page_size % 2 == 0, "rows of a pair lie in one word"
    q_BHD, block_tables_BP = q_BHD.contiguous(), block_tables_BP.contiguous()
    max_pages = block_tables_BP.shape[1]
    num_parts = triton.cdiv(max_pages * pages.page_size, PART)
    part_out = q_BHD.new_empty(sequences, heads, num_parts, dim, dtype=torch.float32)
    part_max, part_sum = (q_BHD.new_empty(part_out.shape[:3], dtype=torch.float32) for _ in range(2))
    group, words = heads // pages.num_kv_heads, 2 if pages.paired else 1
    kv = pages.storage.view(torch.int32) if pages.paired else pages.storage
    _part_kernel[(sequences, pages.num_kv_heads, num_parts)](
        part_out, part_max, part_sum, q_BHD, kv, block_tables_BP, context_lens_B,
        scale * math.log2(math.e), window, pages.page_stride // words,
        2 * layer * pages.part_elems // words, (2 * layer + 1) * pages.part_elems // words,
        max_pages, heads, num_parts,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, PAGE=pages.page_size,
        PART=PART, BLOCK=BLOCK, PAIRED=pages.paired,
        WIDEN=INTERPRETED, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty_like(q_BHD)
    _sum_kernel[(sequences, heads)](
        out, part_out, part_max, part_sum, context_lens_B, heads, num_parts, DIM=dim, PART=PART, num_warps=1
    )
    return out


def paged_attention_decode_reference(
    q_BHD: torch.Tensor,
    pages: Pages,
    layer: int,
    block_tables_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Plain torch form of `paged_attention_decode`, in float32."""
    out = torch.empty_like(q_BHD)
    group = q_BHD.shape[1] // pages.num_kv_heads
    for seq, context in enumerate(context_lens_B.tolist()):
        first = max(0, context - window) if window else 0
        k_KCD, v_KCD = (part[:, first:context] for part in _rows(pages, layer, block_tables_BP[seq]))
        q_KGD = q_BHD[seq].float().view(pages.num_kv_heads, group, -1)
        weights = torch.softmax(scale * q_KGD @ k_KCD.transpose(1, 2), dim=-1)
        out[seq] = (weights @ v_KCD).flatten(0, 1).to(out.dtype)
    return out


def _rows(pages: Pages, layer: int, table_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all positions of a table, [K, P * S, D], float32."""
    heads, dim, size = pages.num_kv_heads, pages.head_dim, pages.page_size
    pair = 2 if pages.paired else 1
    at = torch.arange(2 * pages.part_elems, device=table_P.device) + 2 * layer * pages.part_elems
    both = pages.storage[table_P.long()[:, None] * pages.page_stride + at].float()
    k, v = both.view(len(table_P), 2, -1).unbind(1)
    k = k.view(-1, heads, dim // pair, size, pair).permute(1, 0, 3, 2, 4)
    v = v.view(-1, heads, size // pair, dim, pair).permute(1, 0, 2, 4, 3)
    return k.reshape(heads, -1, dim), v.reshape(heads, -1, dim)
