"""GPTQ (Frantar et al., arXiv 2210.17323, algorithm 1): rounding column by column, each column's error made
good by the columns that follow, as the inputs' second moments allow.

What lives here: the rounding. What does not: gathering the moments (`pdserve.calibrate`). Columns stay in
order.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import torch

from pdserve.errors import ModelError
from pdserve.quant.forms import QuantWeight, num_groups
from pdserve.quant.rounding import Grid, quantised, scales_of

BLOCK = 64
DAMP = 0.01


def _inverse_factor(moments_KK: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped moments."""
    damped = moments_KK.clone()
    diagonal = damped.diagonal()
    dead = diagonal <= 0
    diagonal[dead] = 1.0
    diagonal += DAMP * diagonal.mean()
    inverse_KK = torch.cholesky_inverse(_cholesky(damped))
    return _cholesky(inverse_KK).T.contiguous()


def _cholesky(matrix_KK: torch.Tensor) -> torch.Tensor:
    factor_KK, info = torch.linalg.cholesky_ex(matrix_KK)
    if int(info) != 0:
        raise ModelError("Calibration saw too little of a layer's inputs for GPTQ; give more text.")
    lower: torch.Tensor = factor_KK
    return lower


def round_with_compensation(weight_NK: torch.Tensor, moments_KK: torch.Tensor, grid: Grid) -> QuantWeight:
    """The weight on its grid. moments_KK: sum of x x^T over calibration rows, float32 or float64.

    Raises ModelError if the moments can not be inverted.
    """
    rest_NK = weight_NK.to(torch.float32).clone()
    factor_KK = _inverse_factor(moments_KK.to(torch.float64)).to(torch.float32)
    num_out, num_in = rest_NK.shape
    size = grid.group_size or num_in
    shape = (num_out, num_groups(num_in, grid.group_size))
    codes_NK, scale_NG = torch.zeros_like(rest_NK), torch.ones(shape)
    zero_NG = None if grid.symmetric else torch.zeros(shape)
    for start in range(0, num_in, BLOCK):
        stop = min(start + BLOCK, num_in)
        errors = torch.zeros(num_out, stop - start)
        for k in range(start, stop):
            if k % size == 0:
                whole = Grid(bits=grid.bits, symmetric=grid.symmetric)
                scale_N1, zero_N1 = scales_of(_ahead(rest_NK, errors, factor_KK, start, k, size), whole)
                scale_NG[:, k // size] = scale_N1[:, 0]
                if zero_NG is not None and zero_N1 is not None:
                    zero_NG[:, k // size] = zero_N1[:, 0]
            scale_N = scale_NG[:, k // size]
            zero_N = 0.0 if zero_NG is None else zero_NG[:, k // size]
            code_N = ((rest_NK[:, k] / scale_N).round() + zero_N).clamp(grid.low, grid.high)
            codes_NK[:, k] = code_N
            error_N = (rest_NK[:, k] - (code_N - zero_N) * scale_N) / factor_KK[k, k]
            rest_NK[:, k:stop] -= error_N[:, None] * factor_KK[k, k:stop]
            errors[:, k - start] = error_N
        rest_NK[:, stop:] -= errors @ factor_KK[start:stop, stop:]
    return quantised(codes_NK, grid, scale_NG, zero_NG)


def _ahead(
    rest_NK: torch.Tensor, errors: torch.Tensor, factor_KK: torch.Tensor, start: int, k: int, size: int
) -> torch.Tensor:
    """The group that begins at column k, with all errors so far made good in the part beyond this block."""
    stop = min(start + BLOCK, rest_NK.shape[1])
    group = rest_NK[:, k : k + size].clone()
    if k + size > stop:
        beyond = slice(stop, min(k + size, rest_NK.shape[1]))
        group[:, stop - k :] -= errors @ factor_KK[start:stop, beyond]
    return group
