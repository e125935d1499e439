"""Which steps to run before the first request, so that no request pays for first-time costs. Data only."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams


def _seq(number: int, pages: tuple[int, ...], rows: int, start: int = 0) -> SeqStep:
    return SeqStep(
        seq_id=f"warmup-{number}",
        token_ids=(0,) * rows,
        start=start,
        pages=pages,
        sample=True,
        sample_counter=0,
        sampling=SamplingParams(),
    )


def warmup_plans(*, num_pages: int, page_size: int, chunk: int, max_num_seqs: int) -> Iterator[StepPlan]:
    """Prefill chunks, then decode steps of growing width, on the pool's first pages, zeroed at the end.

    chunk: rows of the largest prefill chunk, at most the pool's rows.
    """
    used: set[int] = set()
    for rows in sorted({1, min(64, chunk), chunk}):
        pages = tuple(range(-(-rows // page_size)))
        used.update(pages)
        yield StepPlan(step_id=-1, seqs=(_seq(0, pages, rows),))
    width = 2
    while width <= min(max_num_seqs, num_pages):
        seqs = tuple(_seq(i, (i,), 1, page_size - 1) for i in range(width))
        used.update(range(width))
        yield StepPlan(step_id=-1, seqs=seqs)
        width *= 2
    yield StepPlan(step_id=-1, seqs=(), zero_pages=tuple(sorted(used)))
