"""What every layer of a step sees besides its own input. Data only.

Legend: T tokens of the step, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One step's cache, rows and rotary tables. cos_TD, sin_TD: float32, per row."""

    kv: KVView
    meta: AttentionMeta
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
