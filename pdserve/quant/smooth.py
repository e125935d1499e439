"""Scales that move outliers between a layer's inputs and its weights: SmoothQuant (Xiao et al., arXiv
2211.10438, equation 4) and AWQ (Lin et al., arXiv 2306.00978, equation 4), both searched by output error.

What lives here: a layer's input as calibration saw it, candidate scales, the search. What does not: where
scales are folded (`pdserve.calibrate.folds`), rounding (`rounding`).

Inputs are divided by the scale, columns of weights multiplied. No scaling is always a candidate.

Legend: M rows, N outputs, K inputs, P values that scale together (each input has one of them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pdserve.quant.forms import NO_ACTIVATION, Activation, fake_quantise
from pdserve.quant.rounding import Grid, rounded

SMOOTH_ALPHAS = tuple(step / 20 for step in range(8, 19))
AWQ_ALPHAS = tuple(step / 10 for step in range(1, 10))
FLOOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What linears that share an input see of it. x_MK: some rows; most_K, mean_K: max and mean of |x| over
    all rows. tie_K: int64, which of the P scales an input has; None for one each.
    """

    x_MK: torch.Tensor
    most_K: torch.Tensor
    mean_K: torch.Tensor
    tie_K: torch.Tensor | None = None

    def tied(self, values_K: torch.Tensor, how: str = "amax") -> torch.Tensor:
        """Values by scale [P] from values by input, their maximum or mean."""
        if self.tie_K is None:
            return values_K
        start = torch.zeros(int(self.tie_K.max()) + 1)
        return start.scatter_reduce(0, self.tie_K, values_K, how, include_self=False)

    def spread(self, scale_P: torch.Tensor) -> torch.Tensor:
        """[K]: each input's scale."""
        return scale_P if self.tie_K is None else scale_P[self.tie_K]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What a search found. scale_P: ones for none. alpha: its exponent, None for none. error, plain: squared
    error of the outputs with it, and without."""

    scale_P: torch.Tensor
    alpha: float | None
    error: float
    plain: float


def smooth_scales(most_P: torch.Tensor, weight_P: torch.Tensor, alpha: float) -> torch.Tensor:
    """SmoothQuant's: max |X|^alpha / max |W|^(1 - alpha)."""
    x, w = most_P.clamp(min=FLOOR), weight_P.clamp(min=FLOOR)
    return (x.pow(alpha) / w.pow(1 - alpha)).clamp(min=FLOOR)


def awq_scales(mean_P: torch.Tensor, alpha: float) -> torch.Tensor:
    """AWQ's: mean |X|^alpha, with the greatest and the least scale one over the other."""
    scale_P = mean_P.clamp(min=FLOOR).pow(alpha)
    return scale_P / (scale_P.max() * scale_P.min()).sqrt()


def output_error(
    seen: LayerInput,
    weights: Sequence[torch.Tensor],
    scale_P: torch.Tensor,
    grid: Grid,
    activation: Activation = NO_ACTIVATION,
) -> float:
    """Squared error of all outputs, with inputs and weights scaled and quantised."""
    scale_K = seen.spread(scale_P)
    rough_MK = fake_quantise(seen.x_MK / scale_K, activation)
    error = 0.0
    for weight_NK in weights:
        rough_MN = rough_MK @ rounded(weight_NK * scale_K, grid).T
        error += float((rough_MN - seen.x_MK @ weight_NK.T).square().sum())
    return error


def search_smooth(
    seen: LayerInput, weights: Sequence[torch.Tensor], grid: Grid, activation: Activation
) -> Scaling:
    """SmoothQuant's scales with the alpha of least output error. weights: of all linears with this input."""
    weight_K = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    most_P, weight_P = seen.tied(seen.most_K), seen.tied(weight_K)
    candidates = ((a, smooth_scales(most_P, weight_P, a)) for a in SMOOTH_ALPHAS)
    return _search(seen, weights, candidates, grid, activation)


def search_awq(
    seen: LayerInput, weights: Sequence[torch.Tensor], grid: Grid, activation: Activation = NO_ACTIVATION
) -> Scaling:
    """AWQ's scales with the alpha of least output error. weights: of all linears with this input."""
    mean_P = seen.tied(seen.mean_K, "mean")
    candidates = ((a, awq_scales(mean_P, a)) for a in AWQ_ALPHAS)
    return _search(seen, weights, candidates, grid, activation)


def _search(
    seen: LayerInput,
    weights: Sequence[torch.Tensor],
    candidates: Iterable[tuple[float, torch.Tensor]],
    grid: Grid,
    activation: Activation,
) -> Scaling:
    none_P = torch.ones_like(seen.tied(seen.most_K))
    plain = output_error(seen, weights, none_P, grid, activation)
    best = Scaling(scale_P=none_P, alpha=None, error=plain, plain=plain)
    for alpha, scale_P in candidates:
        error = output_error(seen, weights, scale_P, grid, activation)
        if error < best.error:
            best = Scaling(scale_P=scale_P, alpha=alpha, error=error, plain=plain)
    return best
