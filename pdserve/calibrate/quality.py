"""How far a model's numbers are from the float32 ones: perplexity, top-1 agreement, KL divergence, error by
layer.

What lives here: the measurements. What does not: text (`corpus`), what is shown of them (`report`).

Legend: B sequences, T tokens, M rows (positions), E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pdserve.calibrate.corpus import Batch
from pdserve.calibrate.forward import PlainDecoder

ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Over num_tokens predictions. perplexity: of the text. ratio: to float32's. top1: share of positions
    with the same most likely token. kl: mean KL divergence from float32's distribution, in nats.
    layer_errors: relative error (L2) of the residual after each layer.
    """

    num_tokens: int
    perplexity: float
    ratio: float
    top1: float
    kl: float
    layer_errors: tuple[float, ...]


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    base_loss: float = 0.0
    same: int = 0
    kl: float = 0.0
    rows: int = 0

    def add(self, base_MV: torch.Tensor, other_MV: torch.Tensor, next_M: torch.Tensor) -> None:
        base, other = base_MV.log_softmax(-1), other_MV.log_softmax(-1)
        self.base_loss -= float(base.gather(1, next_M[:, None]).sum(dtype=torch.float64))
        self.loss -= float(other.gather(1, next_M[:, None]).sum(dtype=torch.float64))
        self.same += int((base.argmax(-1) == other.argmax(-1)).sum())
        self.kl += float((base.exp() * (base - other)).sum(dtype=torch.float64))
        self.rows += next_M.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The float32 model's results for a batch. x_BTE: rows for the head. states: the residual by layer."""

    x_BTE: torch.Tensor
    states: tuple[torch.Tensor, ...]


def passes(base: PlainDecoder, batches: Sequence[Batch]) -> list[Pass]:
    """What `compare` needs of the float32 model, once for many comparisons. Memory: all layers' residuals."""
    found: list[Pass] = []
    for batch in batches:
        states: list[torch.Tensor] = []
        x_BTE = base.hidden(batch.tokens_BT, states.append)
        found.append(Pass(x_BTE=x_BTE, states=tuple(states)))
    return found


def compare(
    base: PlainDecoder,
    other: PlainDecoder,
    batches: Sequence[Batch],
    progress: Callable[[int, int], None] | None = None,
    known: Sequence[Pass] | None = None,
) -> Quality:
    """The other model against the float32 one, on the same text. known: `passes` of the base on it."""
    sums = _Sums()
    errors_2L = torch.zeros(2, base.config.num_layers, dtype=torch.float64)
    for done, batch in enumerate(batches):
        exact = passes(base, [batch])[0] if known is None else known[done]
        rough: list[torch.Tensor] = []
        y_BTE = other.hidden(batch.tokens_BT, rough.append)
        _add_rows(sums, base, other, batch, exact.x_BTE, y_BTE)
        _add_errors(errors_2L, exact.states, rough, batch.real_BT)
        if progress is not None:
            progress(done + 1, len(batches))
    return _quality(sums, errors_2L)


def _add_rows(
    sums: _Sums,
    base: PlainDecoder,
    other: PlainDecoder,
    batch: Batch,
    x_BTE: torch.Tensor,
    y_BTE: torch.Tensor,
) -> None:
    """Positions whose next token is of the text."""
    asked_BT = batch.real_BT[:, 1:]
    x_ME, y_ME = x_BTE[:, :-1][asked_BT], y_BTE[:, :-1][asked_BT]
    next_M = batch.tokens_BT[:, 1:][asked_BT]
    for start in range(0, next_M.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        sums.add(base.logits(x_ME[rows]), other.logits(y_ME[rows]), next_M[rows])


def _add_errors(
    errors_2L: torch.Tensor,
    states: Sequence[torch.Tensor],
    rough: Sequence[torch.Tensor],
    real_BT: torch.Tensor,
) -> None:
    for layer, (exact, other) in enumerate(zip(states, rough, strict=True)):
        exact_ME, other_ME = exact[real_BT], other[real_BT]
        errors_2L[0, layer] += (exact_ME - other_ME).square().sum(dtype=torch.float64)
        errors_2L[1, layer] += exact_ME.square().sum(dtype=torch.float64)


def _quality(sums: _Sums, errors_2L: torch.Tensor) -> Quality:
    rows = max(1, sums.rows)
    return Quality(
        num_tokens=sums.rows,
        perplexity=math.exp(sums.loss / rows),
        ratio=math.exp((sums.loss - sums.base_loss) / rows),
        top1=sums.same / rows,
        kl=sums.kl / rows,
        layer_errors=tuple((errors_2L[0] / errors_2L[1].clamp(min=1e-30)).sqrt().tolist()),
    )
