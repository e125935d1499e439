"""Rows whose columns lie on several ranks, put together. Copies only: no number changes.

Collectives take equal shapes; where ranks have different widths, the narrower ones send some zeros more.

Legend: T rows, W the widest rank's columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.parallel.group import Group


def gather_columns(x: torch.Tensor, widths: Sequence[int], group: Group) -> torch.Tensor:
    """All columns in order of rank, [T, sum(widths)], on every rank. x: ours, [T, widths[rank]]."""
    return _joined(group.gather(_padded(x, max(widths))), widths)


def gather_columns_first(x: torch.Tensor, widths: Sequence[int], group: Group) -> torch.Tensor | None:
    """The same on rank 0 alone; None on the others."""
    parts = group.gather_first(_padded(x, max(widths)))
    return None if parts is None else _joined(parts, widths)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    if x.shape[1] == width:
        return x.contiguous()
    padded_TW = x.new_zeros(x.shape[0], width)
    padded_TW[:, : x.shape[1]] = x
    return padded_TW


def _joined(parts: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    return torch.cat([part_TW[:, :width] for part_TW, width in zip(parts, widths, strict=True)], dim=1)
