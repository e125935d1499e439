"""What ranks of one model do with evaluated sequences in the tests: a script, beside one that generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pdserve.engine.runner import ModelRunner, page_layout, rank_config
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model
from pdserve.parallel.group import Group
from pdserve.ranks.plans import decode_plan, encode_plan
from pdserve.sched.plan import EvaluatedRows, EvaluateStep, SeqStep, StepPlan
from pdserve.types import SamplingParams
from tests.support.rank_cases import group_of

PAGE, EACH = 16, 12
PAGES = {"a": (3, 1, 7, 5, 2), "b": (14, 18), "g": (20, 13)}
"""By sequence; "a" lies in the first of two homes, the others in the second."""
TOP = 2


def runner_of(model: str, attention: str, group: Group | None = None) -> ModelRunner:
    """A runner of one rank, or of one device, over pages of two homes."""
    loaded = load_model(model, "float32")
    config = rank_config(loaded.config, group, attention != "divided")
    layout = page_layout(config, page_size=PAGE, dtype=loaded.dtype)
    pool = KVPool.create(layout, 2 * EACH, pool_id=1)
    return ModelRunner(
        loaded, pool, deterministic=True, group=group, attention=attention, threads=1
    )  # fmt: skip


def steps(rank: int, size: int, folder: Path, exchange: str, cases: list[list[str]]) -> list[Any]:
    """What a rank has of each case (model, attention): all of it on rank 0; others' plans come by wire."""
    group = group_of(rank, size, folder, exchange)
    return [run(runner_of(*case, group=group), by_wire=rank > 0) for case in cases]


def run(runner: ModelRunner, *, by_wire: bool = False) -> list[Any]:
    """Tokens, failures and what was made of evaluated sequences, by step."""
    told = []
    for plan in script(runner.config.vocab_size):
        result = runner.execute(decode_plan(encode_plan(plan)) if by_wire else plan)
        made = {name: _plain(rows) for name, rows in sorted(result.evaluated.items())}
        told.append([result.tokens, result.failed, made])
    return told


def _plain(rows: EvaluatedRows) -> list[Any]:
    found = [
        [each.token_id, each.logprob, [[top.token_id, top.logprob] for top in each.top]]
        for each in rows.logprobs
    ]
    return [found, list(rows.hidden_sum)]


def script(vocab_size: int) -> Iterator[StepPlan]:
    """Chunks of which nothing, a part and all is looked at; with and without a row that is sampled."""
    a, b, g = (_tokens(count, seed, vocab_size) for seed, count in enumerate((70, 30, 20)))

    def logprobs(start: int, end: int, rows: int) -> SeqStep:
        targets = a[end - rows + 1 : end + 1]
        step = EvaluateStep(num_rows=rows, targets=targets, num_top=TOP)
        return _step("a", a[start:end], start, evaluate=step)

    yield _plan(_step("a", a[:10], 0))
    yield _plan(_step("g", g, 0, sample=True), logprobs(10, 50, 33), _step("b", b[:9], 0))
    yield _plan(logprobs(50, 70, 20))
    yield _plan(_step("b", b[9:], 9, evaluate=EvaluateStep(num_rows=21)), _step("g", (5,), 20, sample=True))


def _tokens(count: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())


def _plan(*seqs: SeqStep) -> StepPlan:
    return StepPlan(step_id=0, seqs=seqs)


def _step(
    name: str, token_ids: tuple[int, ...], start: int, *, sample: bool = False,
    evaluate: EvaluateStep | None = None,
) -> SeqStep:  # fmt: skip
    return SeqStep(
        seq_id=name, token_ids=token_ids, start=start, pages=PAGES[name], sample=sample, sample_counter=0,
        sampling=SamplingParams(), evaluate=evaluate,
    )  # fmt: skip
