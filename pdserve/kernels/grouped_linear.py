"""The grouped linear layer: rows lie sorted by group (expert), and each group's rows meet their own weight.

A row's result is the very chain of operations of `linear` with that group's weight: it depends neither on the
other rows nor on how many of them share its group. Sorting is not here (`routing`).

Legend: M rows, G groups, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.memory import empty_weight
from pdserve.kernels.native import DTYPE_CODE, library


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroups:
    """Weights of all groups, each in the panels of `PackedLinear`. weights: [G, packed elements].

    A group's weight may be replaced while no product runs: `replace`. rows, at_G: where the groups' weights
    lie apart (`scattered`), each of them, and int64 their addresses; `weights` is empty then.
    """

    weights: torch.Tensor
    num_out: int
    num_in: int
    dtype: torch.dtype
    panel: int
    rows: tuple[torch.Tensor, ...] = ()
    at_G: torch.Tensor | None = None

    @classmethod
    def pack(cls, weight_GNK: torch.Tensor, *, dtype: torch.dtype | None = None) -> PackedGroups:
        """Pack plain weights [G, N, K] (kept by nobody here) as dtype (default: their own)."""
        dtype = dtype or weight_GNK.dtype
        groups, num_out, num_in = weight_GNK.shape
        panel = library().pds_panel_width()
        panels, steps = -(-num_out // panel), -(-num_in * dtype.itemsize // 4)
        size = panels * steps * panel * 4 // dtype.itemsize
        weights = empty_weight(groups * size, dtype).view(groups, size)
        packed = cls(weights=weights, num_out=num_out, num_in=num_in, dtype=dtype, panel=panel)
        for group in range(groups):
            packed.replace(group, weight_GNK[group])
        return packed

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.rows) or self.weights.shape[0]

    def row(self, group: int) -> torch.Tensor:
        """One group's packed elements, in place."""
        return self.rows[group] if self.rows else self.weights[group]

    def scattered(self, rows: Sequence[torch.Tensor]) -> PackedGroups:
        """Groups of the same shape with these packed weights, wherever they lie; nothing is copied."""
        at_G = torch.tensor([row.data_ptr() for row in rows], dtype=torch.int64)
        return replace(self, weights=self.weights[:0], rows=tuple(rows), at_G=at_G)

    def replace(self, group: int, weight_NK: torch.Tensor) -> None:
        """Overwrites one group's weight with a plain one."""
        assert tuple(weight_NK.shape) == (self.num_out, self.num_in)
        plain = weight_NK.to(self.dtype).contiguous()
        library().pds_pack_linear(
            self.row(group).data_ptr(),
            plain.data_ptr(),
            self.num_out,
            self.num_in,
            DTYPE_CODE[self.dtype],
        )

    def group(self, group: int) -> PackedLinear:
        """One group as a linear layer over the same memory."""
        return PackedLinear(
            weight=self.row(group), bias=None, num_out=self.num_out, num_in=self.num_in,
            dtype=self.dtype, panel=self.panel,
        )  # fmt: skip


def grouped_linear(
    x_MK: torch.Tensor, offsets_G: torch.Tensor, packed: PackedGroups, *, out_float32: bool = False
) -> torch.Tensor:
    """Row m of group g is x[m] @ weight[g].T: [M, N] in x's dtype (the packed one), summed in float32.

    offsets_G: int64 [G + 1], ascending from 0 to M; rows [offsets[g], offsets[g + 1]) belong to group g.
    out_float32: return the sums unrounded.
    """
    assert x_MK.dtype is packed.dtype
    assert offsets_G.dtype is torch.int64
    assert offsets_G.shape[0] == packed.num_groups + 1
    x_MK = x_MK.contiguous()
    rows = x_MK.shape[0]
    out = torch.empty(rows, packed.num_out, dtype=torch.float32 if out_float32 else packed.dtype)
    where = (packed.weights.data_ptr(), None) if packed.at_G is None else (None, packed.at_G.data_ptr())
    fits = library().pds_grouped_linear(
        out.data_ptr(), x_MK.data_ptr(), *where, offsets_G.data_ptr(),
        packed.num_groups, rows, packed.num_out, packed.num_in, DTYPE_CODE[packed.dtype], out_float32,
    )  # fmt: skip
    assert fits, "the offsets are not those of the rows"
    return out


def grouped_linear_reference(
    x_MK: torch.Tensor, offsets_G: torch.Tensor, packed: PackedGroups, *, out_float32: bool = False
) -> torch.Tensor:
    """Plain torch form of `grouped_linear`."""
    bounds = offsets_G.tolist()
    parts = [
        x_MK[begin:end].float() @ packed.group(g).unpack().float().T
        for g, (begin, end) in enumerate(pairwise(bounds))
    ]
    out = torch.cat(parts)
    return out if out_float32 else out.to(packed.dtype)
