"""GGUF's block formats as quantised weights: the codes of the file, never rounded again.

What lives here: Q4_0, Q4_1 and Q8_0, whose blocks of 32 are the groups of `QuantWeight`. What does not: other
types, which are dequantised (`dequant`), names of tensors (`gguf_weights`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from pdserve.models.dequant import half_at, nibbles_at
from pdserve.quant.forms import QuantWeight

Kind = GGMLQuantizationType
BLOCK = 32
_BLOCK_BYTES = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}


def stored_bits(kind: GGMLQuantizationType) -> int:
    """Bits of the codes that `quant_weight` keeps of a type; 0 for types it does not take."""
    return {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}.get(kind, 0)


def quant_weight(
    raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> QuantWeight | None:
    """The matrix as it lies in the file, or None for a type or shape that has no such form.

    raw: all its bytes. Raises ModelError for scales that are not numbers.
    """
    if kind not in _BLOCK_BYTES or len(shape) != 2:
        return None
    blocks_BX = torch.from_numpy(raw).view(-1, _BLOCK_BYTES[kind])
    groups = (shape[0], shape[1] // BLOCK)
    scale_NG = half_at(blocks_BX, 0).view(groups)
    if kind is Kind.Q8_0:
        codes_NK = blocks_BX[:, 2:].contiguous().view(torch.int8).view(shape)
        return QuantWeight(codes_NK=codes_NK, scale_NG=scale_NG, bits=8, group_size=BLOCK)
    at = 2 if kind is Kind.Q4_0 else 4
    codes_NK = nibbles_at(blocks_BX, at).to(torch.int8).sub_(8).view(shape)
    minimum_NG = None if kind is Kind.Q4_0 else half_at(blocks_BX, 2).view(groups) + 8 * scale_NG
    return QuantWeight(codes_NK=codes_NK, scale_NG=scale_NG, minimum_NG=minimum_NG, bits=4, group_size=BLOCK)
