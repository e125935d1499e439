"""What is checked and timed: shapes, random data, bytes and operations. No clock and no judgement here.

Legend: M rows, G groups, N outputs, K inputs, B sequences, H query heads, D head dim, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.triton.paged_attention import Pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A mixture's product: tokens that take top_k of the groups, unevenly."""

    name: str
    tokens: int
    groups: int
    top_k: int
    num_out: int
    num_in: int
    dtype: torch.dtype = torch.bfloat16

    def data(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x_MK, offsets_G, weights_GNK): sizes of groups are uneven, some zero where rows are few."""
        rows = self.tokens * self.top_k
        share_G = torch.rand(self.groups, device=device) + 0.25
        taken_M = torch.multinomial(share_G, rows, replacement=True)
        sizes_G = torch.bincount(taken_M, minlength=self.groups)
        offsets_G = torch.cat([sizes_G.new_zeros(1), sizes_G.cumsum(0)])
        x_MK = torch.randn(rows, self.num_in, device=device, dtype=self.dtype)
        weights_GNK = torch.randn(self.groups, self.num_out, self.num_in, device=device, dtype=self.dtype)
        return x_MK, offsets_G, weights_GNK

    def work(self, offsets_G: torch.Tensor) -> tuple[int, int]:
        """(bytes that must move once, operations)."""
        rows, item = self.tokens * self.top_k, self.dtype.itemsize
        used = int((offsets_G.diff() > 0).sum())
        size = rows * (self.num_in + self.num_out) + used * self.num_out * self.num_in
        return size * item, 2 * rows * self.num_out * self.num_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Attention of one row per sequence. longest: tokens; contexts are random from half of it, or equal."""

    name: str
    sequences: int
    heads: int
    kv_heads: int
    dim: int
    longest: int
    page_size: int
    dtype: torch.dtype = torch.bfloat16
    equal: bool = False

    def data(self, device: str) -> tuple[torch.Tensor, Pages, torch.Tensor, torch.Tensor]:
        """(q_BHD, pages of one layer, block_tables_BP, context_lens_B); pages in no order."""
        per_sequence = -(-self.longest // self.page_size)
        num_pages = self.sequences * per_sequence
        elems = 2 * self.kv_heads * self.dim * self.page_size
        pages = Pages(
            storage=torch.randn(num_pages * elems, device=device, dtype=self.dtype),
            page_stride=elems, num_kv_heads=self.kv_heads, head_dim=self.dim, page_size=self.page_size,
        )  # fmt: skip
        tables_BP = (
            torch.randperm(num_pages, device=device).to(torch.int32).view(self.sequences, per_sequence)
        )
        least = self.longest if self.equal else max(1, self.longest // 2)
        lens_B = torch.randint(least, self.longest + 1, (self.sequences,), device=device, dtype=torch.int32)
        q_BHD = torch.randn(self.sequences, self.heads, self.dim, device=device, dtype=self.dtype)
        return q_BHD, pages, tables_BP, lens_B

    def work(self, lens_B: torch.Tensor) -> tuple[int, int]:
        """(bytes that must move once, operations)."""
        tokens = int(lens_B.sum())
        rows = 2 * self.sequences * self.heads * self.dim
        size = 2 * tokens * self.kv_heads * self.dim + rows
        return size * self.dtype.itemsize, 4 * tokens * self.heads * self.dim


F32 = torch.float32
CHECKED = (
    Grouped(name="prefill", tokens=3000, groups=16, top_k=2, num_out=1536, num_in=2048),
    Grouped(name="some rows", tokens=300, groups=16, top_k=4, num_out=1000, num_in=712),
    Grouped(name="decode", tokens=5, groups=64, top_k=8, num_out=1536, num_in=2048),
    Grouped(name="float32", tokens=700, groups=8, top_k=2, num_out=520, num_in=300, dtype=F32),
    Grouped(name="float32 decode", tokens=3, groups=8, top_k=2, num_out=520, num_in=320, dtype=F32),
    Decode(name="32/8 heads of 128", sequences=40, heads=32, kv_heads=8, dim=128, longest=3000, page_size=16),
    Decode(name="9/3 heads of 64", sequences=9, heads=9, kv_heads=3, dim=64, longest=700, page_size=32),
    Decode(name="64/1 heads of 128", sequences=3, heads=64, kv_heads=1, dim=128, longest=513, page_size=128),
    Decode(name="page of 48", sequences=5, heads=8, kv_heads=8, dim=64, longest=500, page_size=48),
    Decode(name="float32", sequences=7, heads=8, kv_heads=2, dim=128, longest=900, page_size=16, dtype=F32),
)
TIMED = (
    Grouped(name="8 x [14336, 4096], 16k rows", tokens=8192, groups=8, top_k=2, num_out=14336, num_in=4096),
    Grouped(name="128 x [1536, 2048], 64k rows", tokens=8192, groups=128, top_k=8, num_out=1536, num_in=2048),
    Grouped(name="128 x [1536, 2048], 512 rows", tokens=64, groups=128, top_k=8, num_out=1536, num_in=2048),
    Grouped(name="8 x [14336, 4096], 64 rows", tokens=32, groups=8, top_k=2, num_out=14336, num_in=4096),
    Decode(
        name="128 x 4k, 32/8 heads of 128", sequences=128, heads=32, kv_heads=8, dim=128, longest=4096,
        page_size=64, equal=True,
    ),
    Decode(
        name="128 x 2k-4k, pages of 16", sequences=128, heads=32, kv_heads=8, dim=128, longest=4096,
        page_size=16,
    ),
    Decode(
        name="8 x 32k, 64/8 heads of 128", sequences=8, heads=64, kv_heads=8, dim=128, longest=32768,
        page_size=64, equal=True,
    ),
    Decode(
        name="512 x 1k, 32/8 heads of 64", sequences=512, heads=32, kv_heads=8, dim=64, longest=1024,
        page_size=32, equal=True,
    ),
)  # fmt: skip
TINY = (
    Grouped(name="tiny", tokens=9, groups=4, top_k=2, num_out=40, num_in=72),
    Grouped(name="tiny float32", tokens=9, groups=4, top_k=2, num_out=40, num_in=70, dtype=F32),
    Decode(name="tiny", sequences=2, heads=4, kv_heads=2, dim=64, longest=90, page_size=16),
    Decode(
        name="tiny float32", sequences=2, heads=3, kv_heads=1, dim=128, longest=60, page_size=48, dtype=F32
    ),
)
