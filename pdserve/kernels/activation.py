"""The gated activation of the MLP: SwiGLU's elementwise part (Shazeer 2020).

Legend: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with gate the first F columns and up the last; in float32, rounded once to dtype."""
    return silu_mul_reference(gate_up_T2F)


def silu_mul_reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `silu_mul`."""
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up_T2F.dtype)
