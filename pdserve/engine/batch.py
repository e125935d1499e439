"""A step's sequences as the flat arrays that the model takes, and the checks that keep a bad one out.

What lives here: numbers only. What does not: running the model (`runner`), deciding what runs (`sched`).

Legend: T tokens of the step, R rows that are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.sched.plan import SeqStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one forward pass. sampled: the sequences of rows R, in order; `num_wanted` of each."""

    token_ids_T: torch.Tensor
    meta: AttentionMeta
    logit_rows_R: torch.Tensor
    sampled: tuple[SeqStep, ...]


def fault(seq: SeqStep, *, vocab_size: int, num_pages: int, page_size: int, max_context: int) -> str | None:
    """Why the sequence can not be computed, or None."""
    end = seq.start + len(seq.token_ids)
    if not seq.token_ids or seq.start < 0:
        return "the step has no rows for it"
    if min(seq.token_ids) < 0 or max(seq.token_ids) >= vocab_size:
        return "a token id lies outside the model's vocabulary"
    if end > max_context:
        return "it is longer than the model's context"
    if len(seq.pages) * page_size < end:
        return "its block table is shorter than its rows"
    if seq.evaluate is not None and max(seq.evaluate.targets, default=0) >= vocab_size:
        return "a token id lies outside the model's vocabulary"
    if min(seq.pages) < 0 or max(seq.pages) >= num_pages:
        return "its block table names a page that the pool does not have"
    return None


def num_wanted(seq: SeqStep) -> int:
    """How many of its rows, the last ones, are looked at."""
    return int(seq.sample) if seq.evaluate is None else seq.evaluate.num_rows


def build_batch(seqs: Sequence[SeqStep], page_size: int) -> Batch:
    """Flattens checked sequences (at least one), in order."""
    lens = [len(s.token_ids) for s in seqs]
    contexts = [s.start + n for s, n in zip(seqs, lens, strict=True)]
    tables = [s.pages[: -(-end // page_size)] for s, end in zip(seqs, contexts, strict=True)]
    wanted = np.fromiter(map(num_wanted, seqs), np.int64, len(seqs))
    before = np.cumsum(lens) - np.cumsum(wanted)  # a wanted row, less its number among those
    rows = np.repeat(before, wanted) + np.arange(wanted.sum())
    flat = np.fromiter((t for s in seqs for t in s.token_ids), np.int64, sum(lens))
    return Batch(
        token_ids_T=torch.from_numpy(flat),
        meta=AttentionMeta.build(lens, contexts, tables, page_size=page_size),
        logit_rows_R=torch.from_numpy(rows),
        sampled=tuple(s for s in seqs if num_wanted(s)),
    )
