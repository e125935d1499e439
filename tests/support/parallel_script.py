"""One fixed script of steps for runners of any number of ranks: chunks, decode rows and both together.

Tokens are given, not sampled, so that all ranks can make the same plans by themselves; what would have been
sampled is compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pdserve.engine.runner import ModelRunner, page_layout, rank_config
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.parallel.group import Group
from pdserve.parallel.placement_table import Placement
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams

PAGE = 16
NUM_PAGES = 24
TABLES = {"a": (3, 9, 1, 14, 7), "b": (5, 2, 11)}
"""Pages in no order: ranks have the same ids, and nobody counts on neighbours."""


def script_runner(
    model: LoadedModel, *, deterministic: bool, group: Group | None = None, placement: Placement | None = None
) -> ModelRunner:
    """A runner with a pool of its own, which holds the KV heads of its rank."""
    layout = page_layout(rank_config(model.config, group), page_size=PAGE, dtype=model.dtype)
    pool = KVPool.create(layout, NUM_PAGES, pool_id=1)
    return ModelRunner(
        model,
        pool,
        deterministic=deterministic,
        capture_logits=True,
        group=group,
        placement=placement,
        threads=1,
    )


def run_script(runner: ModelRunner) -> tuple[list[dict[str, int]], np.ndarray]:
    """(tokens by step, sampled rows [R, V] of all steps in order; no columns where nothing is sampled)."""
    told, rows = [], []
    for plan in script(runner.config.vocab_size):
        result = runner.execute(plan)
        assert result.failed is None
        told.append(result.tokens)
        rows += [runner.last_logits[name].numpy() for name in sorted(runner.last_logits)]
    return told, np.stack(rows) if rows else np.empty((0, 0))


def script(vocab_size: int) -> Iterator[StepPlan]:
    """A prompt in chunks, another beside it, a copied page, then decode rows."""
    a, b = _tokens(70, 1, vocab_size), _tokens(45, 2, vocab_size)
    yield _plan(_step("a", a[:23], 0, sample=False))
    yield _plan(_step("b", b[:40], 0), _step("a", a[23:66], 23))
    yield StepPlan(step_id=0, seqs=(), copies=((TABLES["b"][2], 20),), zero_pages=(21,))
    for i in range(4):
        yield _plan(_step("b", b[40 + i : 41 + i], 40 + i), _step("a", a[66 + i : 67 + i], 66 + i))


def _tokens(count: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())


def _plan(*seqs: SeqStep) -> StepPlan:
    return StepPlan(step_id=0, seqs=seqs)


def _step(name: str, token_ids: tuple[int, ...], start: int, *, sample: bool = True) -> SeqStep:
    return SeqStep(
        seq_id=name, token_ids=token_ids, start=start, pages=TABLES[name], sample=sample, sample_counter=0,
        sampling=SamplingParams(),
    )  # fmt: skip
