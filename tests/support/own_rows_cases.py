"""What ranks with sequences of their own do in the tests: one script of steps whose pages have homes.

Each rank has a pool of its own with room for all pages, so a rank that read or wrote a page of another home
would find nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.parallel.expert_snapshot import snapshot_from_json
from pdserve.parallel.group import Group
from pdserve.parallel.placement_table import Placement
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams
from tests.support.rank_cases import group_of

PAGE, EACH = 16, 12
TABLES = {"a": (0, (3, 1, 7, 5)), "b": (1, (2, 6, 0)), "c": (1, (4, 1)), "d": (2, (0, 6, 9))}
"""By sequence: home, taken modulo the number of ranks, and pages of that home, in no order."""
LENGTHS = {"a": 60, "b": 44, "c": 22, "d": 43}


def runner_over(
    model: LoadedModel, ranks: int, *, group: Group | None = None, placement: Placement | None = None
) -> ModelRunner:
    """A runner for pages of so many homes; of one rank of the group, or of one device that has them all."""
    pool = KVPool.create(
        page_layout(model.config, page_size=PAGE, dtype=model.dtype), EACH * ranks, pool_id=1
    )
    return ModelRunner(
        model, pool, deterministic=True, capture_logits=True, group=group, placement=placement,
        attention="rows", threads=1,
    )  # fmt: skip


def run(runner: ModelRunner, ranks: int) -> tuple[list[Any], list[np.ndarray]]:
    """(tokens and failures by step, logits [V] in order of step and name)."""
    told: list[Any] = []
    rows = []
    for plan in script(runner.config.vocab_size, ranks):
        result = runner.execute(plan)
        told.append([result.tokens, result.failed])
        rows += [runner.last_logits[name].numpy() for name in sorted(runner.last_logits.keys() - {"x"})]
    return told, rows


def steps(rank: int, size: int, folder: Path, exchange: str, cases: list[list[Any]]) -> list[Any]:
    """Runs the script for every (model, dtype, snapshot of experts or nothing); rank 0 keeps the logits."""
    group = group_of(rank, size, folder, exchange)
    told = []
    for number, (model, dtype, *placed) in enumerate(cases):
        table = snapshot_from_json(placed[0]).table if placed else None
        runner = runner_over(load_model(model, dtype), size, group=group, placement=table)
        runner.warmup(chunk_tokens=32, max_num_seqs=2)
        found, rows = run(runner, size)
        if rank == 0:
            np.save(folder / f"logits-{number}.npy", np.stack(rows))
        load = runner.expert_load
        told.append(
            {
                "steps": found,
                "numerics": runner.numerics_id,
                "load": None if load is None else load.counts_LX.tolist(),
                "written": [page for page in range(runner.num_pages) if any(runner._pool.page_view(page))],
            }
        )
    return told


def script(vocab_size: int, ranks: int) -> Iterator[StepPlan]:
    """A rank alone, chunks without a sample, all ranks, a copied page, one that can not be computed, decode
    rows; some ranks have none of it."""
    tokens = {
        name: _tokens(count, number, vocab_size) for number, (name, count) in enumerate(LENGTHS.items())
    }
    tables = {name: tuple(EACH * (home % ranks) + p for p in pages) for name, (home, pages) in TABLES.items()}

    def step(name: str, start: int, end: int, **fields: Any) -> SeqStep:
        given = {
            "seq_id": name, "token_ids": tokens[name][start:end], "start": start, "pages": tables[name],
            "sample": True, "sample_counter": start, "sampling": SAMPLING[name],
        }  # fmt: skip
        return SeqStep(**{**given, **fields})

    def plan(*seqs: SeqStep, **fields: Any) -> StepPlan:
        return StepPlan(step_id=0, seqs=seqs, **fields)

    free = EACH * (TABLES["a"][0] % ranks) + 2
    yield plan(step("b", 0, 20, sample=False))
    yield plan(step("b", 20, 40), step("a", 0, 40, sample=False), step("c", 0, 17))
    yield plan(copies=((tables["a"][2], free),), zero_pages=(EACH - 1, 2 * EACH - 1))
    tables["a"] = (*tables["a"][:2], free, tables["a"][3])
    straddling = step("a", 0, 20, seq_id="x", pages=(10, EACH + 10))
    yield plan(step("d", 0, 40), straddling, step("a", 40, 56))
    yield plan()
    for i in range(3):
        names = [("c", 17 + i), ("a", 56 + i), ("d", 40 + i), ("b", 40 + i)]
        yield plan(*(step(name, at, at + 1) for name, at in names[i:]))


SAMPLING = {
    name: SamplingParams(temperature=temperature, seed=7)
    for name, temperature in {"a": 0.0, "b": 0.9, "c": 1.3, "d": 0.0}.items()
}


def _tokens(count: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())
