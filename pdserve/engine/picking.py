"""From a step's rows of logits to its tokens: what each sequence asks of its row, one after the other.

What lives here: the order of processing and of log-probabilities, and that a row's failure is its own. What
does not: how a row is changed (`processors`), how a token is drawn from it (`sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.engine.logprobs import token_logprob
from pdserve.engine.masks import Bits, TokenMasks
from pdserve.engine.processors import FloatRow, processed
from pdserve.engine.sampler import Draw, sample_row
from pdserve.sched.plan import SeqStep
from pdserve.types import TokenLogprob

_NO_GRAMMARS = "this server can not follow a grammar; leave it out"


@dataclass(slots=True, kw_only=True)
class Picked:
    """By seq_id: tokens, log-probabilities of those who ask, and why a request can have none."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, other: Picked) -> None:
        """What was picked besides."""
        self.tokens |= other.tokens
        self.logprobs |= other.logprobs
        self.failed |= other.failed


class TokenPicker:
    """Keeps nothing between steps: a token follows from its row and its sequence's step alone."""

    def __init__(self, end_token_ids: tuple[int, ...], masks: TokenMasks | None = None) -> None:
        """end_token_ids: the model's. masks: of grammars; None: a sequence with one fails."""
        self._end_token_ids = end_token_ids
        self._masks = masks

    def pick(self, seqs: Sequence[SeqStep], logits_RV: npt.NDArray[np.float32], best_R: list[int]) -> Picked:
        """A token for each sequence. logits_RV: float32, finite. best_R: each row's best token, the lowest
        id among equals."""
        picked = Picked()
        for seq, row_V, best in zip(seqs, logits_RV, best_R, strict=True):
            try:
                token = self._token(seq, row_V, best)
            except ValueError as why:
                picked.failed[seq.seq_id] = str(why)
                continue
            picked.tokens[seq.seq_id] = token
            if seq.sampling.logprobs is not None:
                picked.logprobs[seq.seq_id] = token_logprob(row_V, token, seq.sampling.logprobs)
        return picked

    def _token(self, seq: SeqStep, row_V: FloatRow, best: int) -> int:
        params = seq.sampling
        if seq.history is not None or params.logit_bias:
            ends, mask = self._end_token_ids, self._mask(seq)
            row_V = processed(row_V, params, seq.history, end_token_ids=ends, mask=mask)
            best = int(row_V.argmax())
        if params.temperature == 0:
            return best
        return sample_row(row_V, Draw(params=params, counter=seq.sample_counter))

    def _mask(self, seq: SeqStep) -> Bits | None:
        if seq.sampling.grammar is None:
            return None
        if self._masks is None:
            raise ValueError(_NO_GRAMMARS)
        return self._masks.allowed(seq)
