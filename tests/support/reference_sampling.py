"""What transformers' logits processors make of a row, in the order in which its `generate` runs them.

What lives here: the outside oracle of sampling, and steps to ask ours with. What does not: any check.
Presence and frequency penalty, which transformers lacks, are OpenAI's formula, written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pdserve.engine.picking import TokenPicker
from pdserve.sched.plan import History, SeqStep
from pdserve.sched.sequence import needs_history
from pdserve.types import SamplingParams

ENDS = (2, 3)
"""End tokens of the model that `tokens` pretends to sample from."""


def processed(
    row: np.ndarray, params: SamplingParams, history: History, ends: Sequence[int] = ENDS
) -> torch.Tensor:
    """Scores [1, V] before temperature."""
    ids = torch.tensor([history.token_ids])
    scores = torch.from_numpy(row)[None].clone()
    first, then = LogitsProcessorList(), LogitsProcessorList()
    if params.logit_bias:
        first.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.repetition_penalty != 1.0:
        first.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        then.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        stops = sorted({*params.stop_token_ids, *(() if params.ignore_eos else ends)})
        then.append(MinNewTokensLengthLogitsProcessor(history.num_prompt, params.min_tokens, stops))
    scores = first(ids, scores)
    for token, count in Counter(history.token_ids[history.num_prompt :]).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    return then(ids, scores)


def probabilities(row: np.ndarray, params: SamplingParams, history: History | None = None) -> np.ndarray:
    """Probabilities [V] of the next token."""
    scores = torch.from_numpy(row)[None] if history is None else processed(row, params, history)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), scores.double()).softmax(-1)[0].numpy()


def step(
    params: SamplingParams, counter: int = 0, history: History | None = None, name: str = "a"
) -> SeqStep:
    """A step that samples once; its history is there if the parameters need one."""
    return SeqStep(
        seq_id=name, token_ids=(1,), start=0, pages=(0,), sample=True, sample_counter=counter,
        sampling=params, history=history if needs_history(params) else None,
    )  # fmt: skip


def tokens(rows: np.ndarray, steps: Sequence[SeqStep]) -> list[int]:
    """What the engine takes from each row, all in one step."""
    named = [
        SeqStep(
            seq_id=str(i), token_ids=s.token_ids, start=s.start, pages=s.pages, sample=True,
            sample_counter=s.sample_counter, sampling=s.sampling, history=s.history,
        )
        for i, s in enumerate(steps)
    ]  # fmt: skip
    picked = TokenPicker(ENDS).pick(named, rows, rows.argmax(axis=1).tolist())
    assert not picked.failed
    return [picked.tokens[s.seq_id] for s in named]
