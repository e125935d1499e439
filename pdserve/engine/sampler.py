"""From a row of logits to a token: temperature, top-k, top-p, min-p, typical-p, counter-based randomness.

What lives here: what one row becomes. What does not: which rows are sampled (`runner`), what else a request
does to its row (`processors`). A token depends on (its row of logits, the parameters, the counter) only:
never on the batch, the clock or earlier draws.

The order of filters and their edges are those of transformers' logits processors: temperature, top-k (ties
with the k-th stay), top-p (a token stays while the mass above it is under p), min-p (relative to the best),
typical-p (Meister et al. 2022: those whose surprise is nearest to the entropy, until their mass reaches p).
A logit of -inf is a token that is impossible; one at least is not.
Random numbers are Philox 4x64 (Salmon et al. 2011), key = seed, counter = the token's completion index.

Legend: V vocabulary, C candidates that pass the filters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.types import SamplingParams

FloatRow = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Row = TypeVar("Row", FloatRow, Weights)
_MASK64 = (1 << 64) - 1
_BLOCK = 256
_FIRST_GUESS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What decides a row's token besides its logits. counter: the token's completion index, from 0."""

    params: SamplingParams
    counter: int


def uniform(seed: int, counter: int) -> float:
    """The uniform number in [0, 1) that belongs to (seed, counter); 53 bits."""
    key = np.array([seed & _MASK64, 0], np.uint64)  # a list would pass large seeds through float64
    philox = np.random.Philox(key=key, counter=np.array([counter & _MASK64, 0, 0, 0], np.uint64))
    return float(int(philox.random_raw()) >> 11) * 2.0**-53


def sample_row(row_V: FloatRow, draw: Draw) -> int:
    """One token, drawn at a temperature above 0."""
    ids_C, weights_C = candidates(row_V, draw.params)
    return int(ids_C[_pick(weights_C, uniform(draw.params.seed, draw.counter))])


def _pick(weights_C: Weights, at: float) -> int:
    """Index where the running sum of weights passes `at` of the total; in blocks, to scan little."""
    sums = np.add.reduceat(weights_C, np.arange(0, weights_C.size, _BLOCK)).cumsum()
    target = at * sums[-1]
    block = min(int(np.searchsorted(sums, target, side="right")), sums.size - 1)
    inside = weights_C[block * _BLOCK : (block + 1) * _BLOCK].cumsum()
    before = float(sums[block - 1]) if block else 0.0
    index = int(np.searchsorted(inside, target - before, side="right"))
    return _last_positive(weights_C, block * _BLOCK + min(index, inside.size - 1))


def _last_positive(weights_C: Weights, index: int) -> int:
    """The index, or the last one before it that has weight: rounding must not choose an impossible token."""
    while weights_C[index] == 0.0 and index > 0:
        index -= 1
    return index


def candidates(row_V: FloatRow, params: SamplingParams) -> tuple[Ids, Weights]:
    """Tokens that pass the filters, and their probabilities up to a common factor.

    Ids come in ascending order, or by falling probability where top-p sorted them.
    """
    with np.errstate(over="ignore"):  # a tiny temperature: everything but the best becomes 0
        weights_V = np.exp((row_V.astype(np.float64) - row_V.max()) / params.temperature)
    ids_C: Ids = np.arange(weights_V.size)
    if 0 < params.top_k < weights_V.size:
        ids_C = _top_k(row_V, params.top_k)
    weights_C = _at(weights_V, ids_C)
    if params.top_p < 1.0:
        order = _top_p(_at(row_V, ids_C), weights_C, params.top_p)
        ids_C, weights_C = ids_C[order], weights_C[order]
    if params.min_p > 0.0:
        keep = weights_C >= params.min_p * weights_C.max()
        ids_C, weights_C = ids_C[keep], weights_C[keep]
    if params.typical_p < 1.0:
        keep = _typical(weights_C, params.typical_p)
        ids_C, weights_C = ids_C[keep], weights_C[keep]
    return ids_C, weights_C


def _at(values_V: Row, ids_C: Ids) -> Row:
    """values[ids] for ascending ids, without the copy where they are all ids."""
    return values_V if ids_C.size == values_V.size else values_V[ids_C]


def _top_k(row_V: Row, k: int) -> Ids:
    kth = np.partition(row_V, row_V.size - k)[row_V.size - k]
    return np.flatnonzero(row_V >= kth)


def falling(row_C: Row, count: int) -> Ids:
    """Indices of the `count` highest by falling logit, lower first among equals (and ties of the last)."""
    index = np.arange(row_C.size) if count >= row_C.size else _top_k(row_C, count)
    return index[np.argsort(-row_C[index], kind="stable")]


def _typical(weights_C: Weights, typical_p: float) -> Ids:
    """Indices of those that stay, ascending; those as far from the entropy as the last one do too. Sorts few
    first."""
    shares = weights_C / weights_C.sum()
    with np.errstate(divide="ignore", invalid="ignore"):  # without weight: infinitely surprising
        surprise = -np.log(shares)
        far = np.abs(surprise - np.nansum(shares * surprise))
    count = _FIRST_GUESS
    while True:
        order = falling(-far, count)
        sums = shares[order].cumsum()
        if sums[-1] >= typical_p or order.size == far.size:
            last = min(int(np.searchsorted(sums, typical_p, side="left")), order.size - 1)
            return np.flatnonzero(far <= far[order[last]])
        count *= 8


def _top_p(row_C: FloatRow, weights_C: Weights, top_p: float) -> Ids:
    """Indices of the heaviest whose mass above them is under top_p of all; at least one. Sorts few first."""
    limit = top_p * weights_C.sum()
    count = _FIRST_GUESS
    while True:
        order = falling(row_C, count)
        sums = weights_C[order].cumsum()
        if sums[-1] >= limit or order.size == row_C.size:
            return order[: max(1, int(np.searchsorted(sums, limit, side="left")) + 1)]
        count *= 8
