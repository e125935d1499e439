"""What a request changes in a row of logits before a token is taken: bias, penalties, what may not come.

What lives here: the steps between the model's logits and the filters of `sampler`. What does not: grammars
themselves (`masks`), log-probabilities, which are of the row as it was (`logprobs`).

Order and edges are those of transformers' processors: logit bias, repetition penalty (tokens of prompt and
completion), bad words (matched over both), end tokens before min_tokens. Presence and frequency penalty
(tokens of the completion; OpenAI's formula) come between, the grammar last. All in float32, as there.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pdserve.engine.masks import Bits, unpacked
from pdserve.sched.plan import History
from pdserve.types import SamplingParams

FloatRow = npt.NDArray[np.float32]
_HIGHEST = float(np.finfo(np.float32).max)
_IMPOSSIBLE = np.float32(-np.inf)


class NothingLeft(ValueError):
    """A request forbids every token. Its text is for the user."""

    def __init__(self) -> None:
        super().__init__(
            "no token is possible any more: bad_words, min_tokens and the grammar forbid all; ask for less"
        )


def processed(
    row_V: FloatRow,
    params: SamplingParams,
    history: History | None,
    *,
    end_token_ids: Iterable[int] = (),
    mask: Bits | None = None,
) -> FloatRow:
    """The row [V] that a token is taken from; -inf: impossible. history: None if only a bias is asked for.

    end_token_ids: the model's. Raises NothingLeft.
    """
    row_V = row_V.copy()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row_V[list(ids)] += np.array(biases, np.float32)
    if history is not None:
        _penalise(row_V, params, history)
        for token_id in _forbidden(params, history, end_token_ids):
            row_V[token_id] = _IMPOSSIBLE
    if mask is not None:
        row_V[~unpacked(mask, row_V.size)] = _IMPOSSIBLE
    if row_V.max() == _IMPOSSIBLE:
        raise NothingLeft
    return row_V


def _penalise(row_V: FloatRow, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array(history.token_ids, np.int64))
        penalty = np.float32(params.repetition_penalty)
        with np.errstate(all="ignore"):  # a tiny one, 0 in float32: as far as numbers go
            penalised = np.where(row_V[seen] < 0, row_V[seen] * penalty, row_V[seen] / penalty)
        row_V[seen] = np.nan_to_num(penalised, nan=0.0, posinf=_HIGHEST, neginf=-_HIGHEST)
    if params.presence_penalty or params.frequency_penalty:
        made = np.array(history.token_ids[history.num_prompt :], np.int64)
        ids, counts = np.unique(made, return_counts=True)
        row_V[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row_V[ids] -= np.float32(params.presence_penalty)


def _forbidden(params: SamplingParams, history: History, end_token_ids: Iterable[int]) -> Iterable[int]:
    tokens = history.token_ids
    for word in params.bad_words:
        if len(word) == 1 or tokens[1 - len(word) :] == word[:-1]:
            yield word[-1]
    if len(tokens) - history.num_prompt < params.min_tokens:
        yield from params.stop_token_ids
        if not params.ignore_eos:
            yield from end_token_ids
