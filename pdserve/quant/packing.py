"""Codes in words of 32 bits, as checkpoints hold them: the first code in the lowest bits.

What lives here: packing and unpacking along the last dimension. What does not: which tensor is packed how
(`layouts`).

Legend: R rows, C codes of a row, W words of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_words(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, W] of unsigned codes (any integer type), the last word filled up with zeros."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes_RC.to(torch.int64), (0, -codes_RC.shape[1] % each))
    shifts = torch.arange(0, 32, bits)
    words = (padded.view(codes_RC.shape[0], -1, each) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_words(
    words_RW: torch.Tensor, bits: int, count: int, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Unsigned codes [R, count], int16. order: which code of a word each run of bits, from the lowest on, is;
    None for in order."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = ((words_RW[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.int16)
    if order is not None:
        codes = codes[..., torch.tensor(order).argsort()]
    return codes.reshape(words_RW.shape[0], -1)[:, :count]
