"""What calibration sees of a layer: its linears' inputs, as samples and sums.

What lives here: gathering them while the layer runs. What does not: what is made of them (`quantise`).

Legend: M rows, K inputs, B sequences, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pdserve.calibrate.corpus import Batch
from pdserve.calibrate.forward import PlainDecoder
from pdserve.quant.smooth import LayerInput

_SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linears that have the input of another one."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """One input, over all rows. samples: some rows. most_K, total_K: max and sum of |x|. moments_KK: sum of x
    x^T, float32.
    """

    num_rows: int = 0
    samples: list[torch.Tensor] = field(default_factory=list)
    most_K: torch.Tensor
    total_K: torch.Tensor
    moments_KK: torch.Tensor

    def add(self, x_MK: torch.Tensor, every: int) -> None:
        """Counts the rows and keeps one in `every`."""
        self.num_rows += x_MK.shape[0]
        self.samples.append(x_MK[::every].clone())
        self.most_K = torch.maximum(self.most_K, x_MK.abs().amax(0))
        self.total_K += x_MK.abs().sum(0)
        self.moments_KK += x_MK.T @ x_MK

    def layer_input(self, tie_K: torch.Tensor | None) -> LayerInput:
        """For the searches."""
        return LayerInput(
            x_MK=torch.cat(self.samples),
            most_K=self.most_K,
            mean_K=self.total_K / max(1, self.num_rows),
            tie_K=tie_K,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Inputs by linear: the last part of its name without ".weight", as q_proj."""

    inputs: dict[str, Seen]

    def of(self, name: str) -> Seen:
        """The input of a weight."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        return self.inputs[_SHARED.get(part, part)]


def observe(
    decoder: PlainDecoder,
    layer: int,
    batches: Sequence[Batch],
    states: Sequence[torch.Tensor],
    max_rows: int,
) -> Observed:
    """Runs the layer over the states [B, T, E] before it; about `max_rows` rows of an input are kept."""
    inputs: dict[str, Seen] = {}
    every = max(1, sum(int(b.real_BT.sum()) for b in batches) // max_rows)
    for batch, x_BTE in zip(batches, states, strict=True):
        real_M = batch.real_BT.reshape(-1)

        def tap(name: str, x_MK: torch.Tensor, real_M: torch.Tensor = real_M) -> None:
            part = name.removesuffix(".weight").rpartition(".")[2]
            if part in _SHARED:
                return
            width = x_MK.shape[1]
            seen = inputs.setdefault(
                part,
                Seen(
                    most_K=torch.zeros(width),
                    total_K=torch.zeros(width),
                    moments_KK=torch.zeros(width, width),
                ),
            )
            seen.add(x_MK[real_M], every)

        decoder.layer(layer, x_BTE, tap)
    return Observed(inputs=inputs)
