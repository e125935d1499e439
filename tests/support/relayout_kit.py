"""Page layouts to re-lay in tests, and the oracle: plain arrays [layer, token, KV head, head dim] packed into
pages.

Here: shapes, values, packing one element after the other. No tests, and nothing of the planner's arithmetic.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.plan import LayerKind, ReplicaLayout

Bits = npt.NDArray[Any]
KERNEL_F32, KERNEL_BF16 = "k[h,d,s] v[h,s,d]", "k[h,d/2,s,2] v[h,s/2,d,2]"
PLAIN = "k[s,h,d] v[s,h,d]"
VARIANTS = {
    "f32": ("float32", KERNEL_F32),
    "bf16": ("bfloat16", KERNEL_BF16),
    "f32-plain": ("float32", PLAIN),
    "bf16-plain": ("bfloat16", PLAIN),
}
BITS = {"float32": np.uint32, "bfloat16": np.uint16}
UNTOUCHED = 0xA5


def heads_for(tp: int, num_kv_heads: int = 3) -> tuple[tuple[range, ...], ...]:
    """KV heads by rank: split where there are enough, else ranks in a row share one."""
    if tp <= num_kv_heads:
        cuts = [-(-rank * num_kv_heads // tp) for rank in range(tp + 1)]
        return tuple((range(low, high),) for low, high in itertools.pairwise(cuts))
    return tuple((range(head, head + 1),) for head in (rank * num_kv_heads // tp for rank in range(tp)))


def layout(variant: str, tp: int, page_size: int, /, **changes: Any) -> ReplicaLayout:
    """A small layout of 2 full layers, 3 KV heads, head dim 4."""
    dtype, inner = VARIANTS[variant]
    fields: dict[str, Any] = {
        "page_size": page_size, "head_dim": 4, "num_kv_heads": 3, "dtype": dtype, "inner": inner,
        "layers": (LayerKind(),) * 2, "ranks": heads_for(tp),
    }  # fmt: skip
    return ReplicaLayout(**{**fields, **changes})


@functools.cache
def values(dtype: str, layers: int, tokens: int, heads: int, dim: int) -> dict[str, Bits]:
    """K and V of a prompt as bits [layer, token, KV head, head dim], NaNs and halfway cases among the
    floats."""
    random = np.random.default_rng(7)
    found = {}
    for name in ("k", "v"):
        bits = random.integers(0, 2**32, (layers, tokens, heads, dim), np.uint32)
        halfway = random.integers(0, 2, bits.shape, np.uint32).astype(bool)
        bits[halfway] = bits[halfway] & 0xFFFF0000 | 0x8000
        found[name] = bits if dtype == "float32" else (bits >> 16).astype(np.uint16)
    return found


def as_dtype(bits: Bits, dtype: str) -> Bits:
    """Bits as torch converts them. NaNs are not compared, see `same`."""
    if bits.dtype == BITS[dtype]:
        return bits
    if dtype == "float32":
        from_bits = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        return from_bits.float().view(torch.int32).numpy().view(np.uint32)
    return torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def same(got: Bits, wanted: Bits) -> bool:
    """Equal bits; any NaN equals any other only where the dtype changed (torch has two of its own)."""
    differ = got != wanted
    if got.dtype == np.uint16:
        differ &= ~((got & 0x7FFF > 0x7F80) & (wanted & 0x7FFF > 0x7F80))
    return not differ.any()


def pack(page_layout: ReplicaLayout, rank: int, page: int, arrays: dict[str, Bits]) -> Bits:
    """A page, put together element by element in the order of memory."""
    first = page * page_layout.page_size
    heads = list(page_layout.heads(rank))
    parts = []
    for layer in page_layout.stored:
        for text in page_layout.inner.split():
            part = arrays[text[0]][layer, first : first + page_layout.page_size][:, heads]
            s, h, d = walk(
                text[2:-1].split(","), h=len(heads), s=page_layout.page_size, d=page_layout.head_dim
            )
            parts.append(part[s, h, d])
    return np.concatenate(parts)


@functools.cache
def _walked(dims: tuple[str, ...], sizes: tuple[tuple[str, int], ...]) -> tuple[list[int], ...]:
    lengths, tiles = dict(sizes), {}
    for dim in dims:
        axis, _, tile = dim.partition("/")
        if tile:
            tiles[axis] = int(tile)
    open_tiles = {tile: axis for axis, tile in reversed(tiles.items())}
    extents = [int(dim) if dim.isdigit() else lengths[dim[0]] // tiles.get(dim[0], 1) for dim in dims]
    places: tuple[list[int], ...] = ([], [], [])
    for index in itertools.product(*map(range, extents)):
        at = dict.fromkeys("shd", 0)
        for dim, i in zip(dims, index, strict=True):
            if dim.isdigit():
                at[open_tiles[int(dim)]] += i
            else:
                at[dim[0]] += i * tiles.get(dim[0], 1)
        for place, axis in zip(places, "shd", strict=True):
            place.append(at[axis])
    return places


def walk(dims: list[str], **sizes: int) -> tuple[list[int], ...]:
    """(s, h, d) of each element of a part, in the order of memory."""
    return _walked(tuple(dims), tuple(sorted(sizes.items())))


def pages_of(
    page_layout: ReplicaLayout, num_pages: int, arrays: dict[str, Bits]
) -> dict[tuple[int, int], Bits]:
    """All ranks' pages."""
    return {
        (rank, page): pack(page_layout, rank, page, arrays)
        for rank in range(len(page_layout.ranks))
        for page in range(num_pages)
    }


def blank(page_layout: ReplicaLayout, num_pages: int) -> dict[tuple[int, int], Bits]:
    """Pages that nobody wrote."""
    return {
        (rank, page): np.full(page_layout.page_bytes(rank), UNTOUCHED, np.uint8).view(BITS[page_layout.dtype])
        for rank in range(len(page_layout.ranks))
        for page in range(num_pages)
    }
