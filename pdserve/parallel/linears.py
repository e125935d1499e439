"""Linears, token table and head of one rank, in the shape of the single-device ones.

What lives here: which product is computed locally and what is exchanged. What does not: cutting weights
(`weights`), the group. A column-parallel linear needs nothing here: it is a plain one with fewer outputs.

    default         y = sum over ranks of (x_r W_r)       one all-reduce, in float32 whatever the dtype
    deterministic   x = all x_r; y = all (x W^r)          two gathers; every output is the same chain of
                                                          multiply-adds as on one rank, bit for bit
W_r: the inputs' part of the weight, W^r: the outputs' part.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, for the column-row pairing and the vocabulary.

Legend: T rows, V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.linear import PackedLinear, linear
from pdserve.parallel.columns import gather_columns, gather_columns_first
from pdserve.parallel.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedLinear:
    """Row-parallel: each rank multiplies its inputs, the products are added. inner: [E, our inputs]; only
    rank 0's has the bias."""

    inner: PackedLinear
    group: Group

    @property
    def num_out(self) -> int:
        return self.inner.num_out

    def __call__(self, x: torch.Tensor, *, out_float32: bool = False) -> torch.Tensor:
        """x: [T, our inputs]; all of [T, E] on every rank, rounded once after the sum."""
        out_TE = linear(x, self.inner, out_float32=True)
        self.group.add(out_TE)
        return out_TE if out_float32 else out_TE.to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredLinear:
    """The deterministic form of a row-parallel linear: all inputs on every rank, which computes its outputs.

    inner: [our outputs, all inputs]. widths_in, widths_out: columns by rank.
    """

    inner: PackedLinear
    widths_in: tuple[int, ...]
    widths_out: tuple[int, ...]
    group: Group

    @property
    def num_out(self) -> int:
        return sum(self.widths_out)

    def __call__(self, x: torch.Tensor, *, out_float32: bool = False) -> torch.Tensor:
        """x: [T, our inputs]; all of [T, E] on every rank."""
        whole = gather_columns(x, self.widths_in, self.group)
        return gather_columns(linear(whole, self.inner, out_float32=out_float32), self.widths_out, self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabTable:
    """The token table with each rank holding the rows of `vocab`; exact in every dtype."""

    weight: torch.Tensor
    vocab: range
    group: Group

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """All of [T, E] on every rank. Words are added as integers, all but one of them zero: even a negative
        zero stays what it is."""
        ours_T = (token_ids_T >= self.vocab.start) & (token_ids_T < self.vocab.stop)
        at_T = torch.where(ours_T, token_ids_T - self.vocab.start, 0)
        rows_TE = self.weight.index_select(0, at_T)
        rows_TE[~ours_T] = 0
        whole_words = rows_TE.shape[1] * rows_TE.itemsize % 4 == 0
        self.group.add(rows_TE.view(torch.int32 if whole_words else torch.uint8))
        return rows_TE


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead:
    """The head with each rank computing the logits of its tokens; rank 0, which samples, gets all of them."""

    inner: PackedLinear
    widths: tuple[int, ...]
    group: Group

    @property
    def num_out(self) -> int:
        return sum(self.widths)

    def __call__(self, x: torch.Tensor, *, out_float32: bool = False) -> torch.Tensor:
        """[T, V] on rank 0; [T, 0] on the others."""
        ours = linear(x, self.inner, out_float32=out_float32)
        whole = gather_columns_first(ours, self.widths, self.group)
        return ours[:, :0] if whole is None else whole
