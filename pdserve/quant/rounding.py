"""Round to nearest: from a plain weight to codes and scales, by output channel or by group of inputs.

What lives here: grids, the rounding, and the search for a narrower range (clipping). What does not: changing
the weight before it is rounded (`smooth`, `awq`), rounding with compensation (`gptq`).

Symmetric 8 bits: scale = max |w| / 127, codes -127 to 127. Symmetric 4 bits: scale = max |w| / 7. Asymmetric:
scale = (max - min) / (2^bits - 1) over a range that holds 0, and an integer zero. With `clip` each group's
range is shrunk by the factor, out of `SHRINKS`, whose error is least.

Legend: N outputs, K inputs, G groups of S inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.errors import ConfigError
from pdserve.quant.forms import CODE_RANGE, QuantWeight, num_groups, spread

SHRINKS = tuple(1 - 0.05 * step for step in range(8))
TINY = 2.0**-100


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which numbers a weight may become. group_size: inputs that share a scale; 0 is all of them.

    clip: search for the range whose error is least. Raises ConfigError for numbers that no grid has.
    """

    bits: int
    group_size: int = 0
    symmetric: bool = True
    clip: bool = False

    def __post_init__(self) -> None:
        if self.bits not in CODE_RANGE or self.group_size < 0:
            raise ConfigError("grid: weights have 4 or 8 bits, and groups of no negative size")

    @property
    def low(self) -> int:
        """The least code; symmetric grids leave out the one that has no opposite."""
        return CODE_RANGE[self.bits][0] + self.symmetric

    @property
    def high(self) -> int:
        """The greatest code."""
        return CODE_RANGE[self.bits][1]


def grouped(values_NK: torch.Tensor, group_size: int) -> torch.Tensor:
    """[N, G, S], the last group filled up with zeros."""
    num_in = values_NK.shape[-1]
    groups = num_groups(num_in, group_size)
    size = group_size or num_in
    padded = torch.nn.functional.pad(values_NK, (0, groups * size - num_in))
    return padded.view(*values_NK.shape[:-1], groups, size)


def scales_of(
    weight_NK: torch.Tensor, grid: Grid, shrink_NG: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale_NG float32, zero_NG float32 whole numbers or None) of the weight's range times `shrink`."""
    groups_NGS = grouped(weight_NK, grid.group_size)
    if grid.symmetric:
        return _storable(groups_NGS.abs().amax(-1) * shrink_NG / grid.high), None
    most_NG, least_NG = (groups_NGS.amax(-1).clamp(min=0), groups_NGS.amin(-1).clamp(max=0))
    scale_NG = _storable((most_NG - least_NG) * shrink_NG / (grid.high - grid.low))
    zero_NG = (grid.low - least_NG * shrink_NG / scale_NG).round().clamp(grid.low, grid.high)
    return scale_NG, zero_NG


def _storable(scale_NG: torch.Tensor) -> torch.Tensor:
    """Scales that bfloat16 holds, so that files of 16-bit scales lose nothing; 1 where all is zero."""
    return torch.where(scale_NG < TINY, 1.0, scale_NG).to(torch.bfloat16).to(torch.float32)


def codes_of(
    weight_NK: torch.Tensor, grid: Grid, scale_NG: torch.Tensor, zero_NG: torch.Tensor | None
) -> torch.Tensor:
    """float32 [N, K], whole numbers: the nearest codes (halves go to the even one)."""
    num_in = weight_NK.shape[1]
    codes_NK = weight_NK / spread(scale_NG, num_in, grid.group_size)
    codes_NK = codes_NK.round()
    if zero_NG is not None:
        codes_NK = codes_NK + spread(zero_NG, num_in, grid.group_size)
    return codes_NK.clamp(grid.low, grid.high)


def quantised(
    codes_NK: torch.Tensor, grid: Grid, scale_NG: torch.Tensor, zero_NG: torch.Tensor | None
) -> QuantWeight:
    """The data type from whole numbers in float32."""
    return QuantWeight(
        codes_NK=codes_NK.to(torch.int8),
        scale_NG=scale_NG,
        zero_NG=None if zero_NG is None else zero_NG.to(torch.int8),
        bits=grid.bits,
        group_size=grid.group_size,
    )


def round_to_nearest(
    weight_NK: torch.Tensor, grid: Grid, moments_GSS: torch.Tensor | None = None
) -> QuantWeight:
    """The weight on its grid. moments_GSS: second moments of each group's inputs, so that clipping goes by
    the error of the layer's output; None: by the weight's own error.
    """
    weight_NK = weight_NK.to(torch.float32)
    shrink_NG = _best_shrink(weight_NK, grid, moments_GSS) if grid.clip else 1.0
    scale_NG, zero_NG = scales_of(weight_NK, grid, shrink_NG)
    return quantised(codes_of(weight_NK, grid, scale_NG, zero_NG), grid, scale_NG, zero_NG)


def rounded(weight_NK: torch.Tensor, grid: Grid, shrink_NG: torch.Tensor | float = 1.0) -> torch.Tensor:
    """float32 [N, K]: what the codes of a weight stand for, for searches (`round_to_nearest` and back)."""
    scale_NG, zero_NG = scales_of(weight_NK, grid, shrink_NG)
    codes_NK = codes_of(weight_NK, grid, scale_NG, zero_NG)
    num_in = weight_NK.shape[1]
    if zero_NG is not None:
        codes_NK = codes_NK - spread(zero_NG, num_in, grid.group_size)
    return codes_NK * spread(scale_NG, num_in, grid.group_size)


def _best_shrink(weight_NK: torch.Tensor, grid: Grid, moments_GSS: torch.Tensor | None) -> torch.Tensor:
    """[N, G]: each group's factor of least squared error."""
    best_NG = torch.ones(weight_NK.shape[0], num_groups(weight_NK.shape[1], grid.group_size))
    least_NG = torch.full_like(best_NG, torch.inf)
    for shrink in SHRINKS:
        error_NGS = grouped(rounded(weight_NK, grid, shrink) - weight_NK, grid.group_size)
        other_NGS = error_NGS
        if moments_GSS is not None:
            other_NGS = torch.einsum("ngs,gst->ngt", error_NGS, moments_GSS)
        error_NG = (error_NGS * other_NGS).sum(-1)
        better_NG = error_NG < least_NG
        best_NG, least_NG = best_NG.where(~better_NG, shrink), least_NG.where(~better_NG, error_NG)
    return best_NG
