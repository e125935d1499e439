"""How one KV page is laid out, and what KV costs. Sizes only: no memory lives here (see `pool`).

A page is one extent of all layers, K and V: [num_layers, 2, part], where a part is one layer's K or V of
`page_size` rows. The order inside a part is the attention kernel's choice, named by `inner`; everybody
else treats a page as opaque bytes with a fingerprint (architecture.md §5).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PAGE_ALIGN_BYTES = 4096
_RANK_STEP = 0x9E3779B97F4A7C15  # odd, so that ids of one replica differ
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element where a part is nothing but elements."""
INT8 = "int8"
"""Pages of codes of one byte, with a float32 scale for each row and head at the end of a part."""
_SCALE_BYTES = 4
PAGE_DTYPES = (*DTYPE_BYTES, INT8)


def pages_for(rows: int, page_size: int) -> int:
    """Number of pages of `page_size` rows that hold `rows` rows."""
    return -(-rows // page_size)


def kv_bytes(
    *, batch: int, length: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int
) -> int:
    """The field's formula: bytes of keys and values of `batch` sequences of `length` tokens each."""
    return batch * num_layers * num_kv_heads * head_dim * 2 * dtype_bytes * length


def rank_pool_id(pool_id: int, rank: int) -> int:
    """The id of a rank's pool, given that of rank 0's: an announced page names the latter for all ranks."""
    return (pool_id + rank * _RANK_STEP) % 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Shape of every page of a pool.

    page_size: rows (tokens) per page. dtype: one of PAGE_DTYPES. inner: name of the order inside a part.
    Raises ValueError for a size below 1 or an unknown dtype.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    inner: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.dtype not in PAGE_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(PAGE_DTYPES)}")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element (of int8: of a code)."""
        return 1 if self.dtype == INT8 else DTYPE_BYTES[self.dtype]

    @property
    def part_elems(self) -> int:
        """Elements of one layer's K or V in a page."""
        return self.num_kv_heads * self.page_size * self.head_dim

    @property
    def page_elems(self) -> int:
        """Elements of a page's payload."""
        return self.num_layers * 2 * self.part_elems

    @property
    def part_bytes(self) -> int:
        """Bytes of one layer's K or V in a page, scales included."""
        scales = self.num_kv_heads * self.page_size * _SCALE_BYTES if self.dtype == INT8 else 0
        return self.part_elems * self.dtype_bytes + scales

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's payload."""
        return self.num_layers * 2 * self.part_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes from one page to the next: the payload rounded up to 4 KiB."""
        return -(-self.page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    def fingerprint(self) -> str:
        """32 hex digits; equal exactly for layouts whose pages mean the same bytes."""
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        text = "|".join(("pdserve-page-1", *map(str, sizes), self.dtype, self.inner))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
