"""What attention needs to know about a step: which rows belong to which sequence, and where its KV lies.

Legend: B sequences, T tokens of the step, P pages of the longest block table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


class _NativeMeta(ctypes.Structure):
    """The C++ side's `AttentionDesc` (csrc/common.h)."""

    _fields_ = (
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("num_seqs", ctypes.c_int64),
        ("max_pages", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeta:
    """One step's rows by sequence; the same for all layers.

    query_starts_B1: int32; sequence b has rows [starts[b], starts[b+1]), whose positions end at
    context_lens_B[b] - 1. context_lens_B: int32, tokens in the cache including this step's. block_tables_BP:
    int32, pages in order of position, padded with 0. positions_T, slots_T: int32, per row: position in its
    sequence (for rope), and page * page_size + row (for write_kv).
    """

    query_starts_B1: torch.Tensor
    context_lens_B: torch.Tensor
    block_tables_BP: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    native: int = field(init=False, repr=False)
    """Address of the C++ descriptor."""
    _keep: _NativeMeta = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tables = self.block_tables_BP
        meta = _NativeMeta(
            self.query_starts_B1.data_ptr(), self.context_lens_B.data_ptr(), tables.data_ptr(), *tables.shape
        )
        object.__setattr__(self, "_keep", meta)
        object.__setattr__(self, "native", ctypes.addressof(meta))

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        page_size: int,
    ) -> AttentionMeta:
        """From plain numbers per sequence (at least one): rows of this step, tokens including them, pages.

        Each query_len is 1 up to its context_len; each block table covers its context.
        """
        lens = np.asarray(query_lens, dtype=np.int32)
        ctx = np.asarray(context_lens, dtype=np.int32)
        starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=starts[1:])
        tables = np.zeros((len(lens), max(map(len, block_tables))), dtype=np.int32)
        for row, pages in zip(tables, block_tables, strict=True):
            row[: len(pages)] = pages
        seq = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
        positions = np.arange(starts[-1], dtype=np.int32) - starts[seq] + (ctx - lens)[seq]
        slots = tables[seq, positions // page_size] * page_size + positions % page_size
        return cls(
            query_starts_B1=torch.from_numpy(starts),
            context_lens_B=torch.from_numpy(ctx),
            block_tables_BP=torch.from_numpy(tables),
            positions_T=torch.from_numpy(positions),
            slots_T=torch.from_numpy(slots),
        )
