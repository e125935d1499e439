"""The gated activation of the MLP: SwiGLU's elementwise part (Shazeer 2020).

Legend: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch

from pdserve.kernels.native import DTYPE_CODE, library


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with gate the first F columns and up the last; in float32, rounded once to dtype."""
    gate_up_T2F = gate_up_T2F.contiguous()
    rows, width = gate_up_T2F.shape
    out = torch.empty(rows, width // 2, dtype=gate_up_T2F.dtype)
    code = DTYPE_CODE[gate_up_T2F.dtype]
    library().pds_silu_mul(out.data_ptr(), gate_up_T2F.data_ptr(), rows, width // 2, code)
    return out


def silu_mul_reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `silu_mul`."""
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up_T2F.dtype)
