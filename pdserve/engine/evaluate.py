"""What is made of the rows of sequences that are only evaluated: log-probabilities and sums of hidden states.

What lives here: the figures. What does not: which rows a step looks at (`pdserve.sched`), the model itself.

Legend: A rows that are looked at, R rows of one sequence, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from pdserve.engine.batch import num_wanted
from pdserve.engine.logprobs import token_logprob
from pdserve.models.decoder import Decoder
from pdserve.sched.plan import EvaluatedRows, EvaluateStep, SeqStep

BLOCK = 32
"""Rows whose logits there are at a time: 6 MB of a vocabulary of 49,152."""


class Evaluations:
    """Those of one step. Compute thread."""

    def __init__(self) -> None:
        self.rows: dict[str, EvaluatedRows] = {}
        self.not_numbers: set[str] = set()

    def run(
        self, decoder: Decoder, seqs: Sequence[SeqStep], x_AE: torch.Tensor
    ) -> tuple[tuple[SeqStep, ...], torch.Tensor]:
        """Keeps what is made of evaluated sequences. Returns the others, which are sampled, and their logits
        [R, V]. seqs: of the rows in x_AE, in order. Ranks that share a head call this alike; those that get
        no logits keep nothing of use."""
        sampled: list[SeqStep] = []
        rows: list[torch.Tensor] = [x_AE[:0]]
        for seq, x_RE in zip(seqs, torch.split(x_AE, [num_wanted(seq) for seq in seqs]), strict=True):
            if seq.evaluate is None:
                sampled.append(seq)
                rows.append(x_RE)
            else:
                self._keep(seq.seq_id, _evaluate(decoder, seq.evaluate, x_RE))
        return tuple(sampled), decoder.logits(torch.cat(rows))

    def _keep(self, seq_id: str, rows: EvaluatedRows) -> None:
        """Rows whose figures are no numbers are the sequence's failure."""
        if math.isfinite(sum(rows.hidden_sum) + sum(each.logprob for each in rows.logprobs)):
            self.rows[seq_id] = rows
        else:
            self.not_numbers.add(seq_id)


def _evaluate(decoder: Decoder, step: EvaluateStep, x_RE: torch.Tensor) -> EvaluatedRows:
    if step.num_top is None:
        total_E = np.add.reduce(x_RE.float().numpy(), axis=0, dtype=np.float64)
        return EvaluatedRows(hidden_sum=tuple(total_E.tolist()))
    found = []
    for at in range(0, len(step.targets), BLOCK):
        targets = step.targets[at : at + BLOCK]
        logits_RV = decoder.logits(x_RE[at : at + len(targets)])
        if logits_RV.shape[1]:  # else they are another rank's
            rows = zip(logits_RV.numpy(), targets, strict=True)
            found += [token_logprob(row_V, target, step.num_top) for row_V, target in rows]
    return EvaluatedRows(logprobs=tuple(found))
