"""Whole steps of one process: prompts of many lengths, decode by context and batch, beside their floors.

What lives here: `measure_engine`. What does not: which steps (`steps`), what they cost at least (`floors`),
tables (`pdserve.cli`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdserve.bench.floors import Peaks, Work, floor_seconds, share
from pdserve.bench.machine import machine
from pdserve.bench.model_work import work_of
from pdserve.bench.peaks import DEFAULT_SIZES, measure_peaks, num_peaks
from pdserve.bench.results import document
from pdserve.bench.steps import DECODE, PAGE, PREFILL, Case, fill_plans
from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.native import isa
from pdserve.kernels.stack import PHASES
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model

FILL_TOKENS = 256
OTHER = "other"
"""Of a step, all that is not the one call for its layers: batch, embeddings, best tokens, sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWish:
    """What to measure. kv_dtype: of pages; auto: the model's. prompts: lengths. contexts,
    batches: of decode steps. seconds: for each case.

    chunk_tokens: of a prompt, computed at once. pool_bytes: of pages; decode steps that need more are left
    out. threads: None for the process's default. peak_seconds: for each of the machine's peaks.
    """

    model: str
    weights: str
    dtype: str
    kv_dtype: str
    prompts: Sequence[int]
    contexts: Sequence[int]
    batches: Sequence[int]
    chunk_tokens: int
    seconds: float
    pool_bytes: int
    threads: int | None = None
    peak_seconds: float = 0.5
    peak_sizes: Sequence[int] = DEFAULT_SIZES

    def cases(self) -> list[Case]:
        """All that were asked for."""
        prompts = [Case(phase=PREFILL, context=n, chunk=self.chunk_tokens) for n in self.prompts]
        steps = [Case(phase=DECODE, context=n, batch=b) for b in self.batches for n in self.contexts]
        return prompts + steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Cases that can be measured, and names of those that need more pages than there may be."""

    cases: Sequence[Case]
    skipped: Sequence[str]

    @property
    def num_pages(self) -> int:
        """Pages for the largest."""
        return max((case.num_pages for case in self.cases), default=1)


def select(wish: EngineWish, layout: PageLayout, max_context: int, vocab: int) -> Selected:
    """Raises ConfigError for a prompt or context that the model can not have, and if nothing is left."""
    for option, lengths in (("prompts", wish.prompts), ("contexts", wish.contexts)):
        if any(length > max_context for length in lengths):
            raise ConfigError(f"{option}: the model's context has {max_context} tokens")
    cases = [replace(case, vocab=min(case.vocab, vocab)) for case in wish.cases()]
    fits = [case.num_pages * layout.stride_bytes <= wish.pool_bytes for case in cases]
    kept = [case for case, fit in zip(cases, fits, strict=True) if fit]
    if not kept:
        raise ConfigError("pool_gib: no case fits into so little memory for pages")
    return Selected(cases=kept, skipped=[case.name for case, fit in zip(cases, fits, strict=True) if not fit])


Progress = Callable[[int, int], None]
"""Called with (measured, in all), first with (0, in all)."""


def measure_engine(wish: EngineWish, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """The result document. Raises ConfigError and ModelError."""
    about = machine()
    model = load_model(wish.model, wish.dtype, keep_quantised=wish.weights != "exact")
    pages = wish.dtype if wish.kv_dtype == "auto" else wish.kv_dtype
    layout = page_layout(model.config, page_size=PAGE, dtype=pages)
    chosen = select(wish, layout, model.config.max_context, model.config.vocab_size)
    runner, work = _built(model, layout, chosen.num_pages, wish)
    total = 2 * num_peaks(wish.peak_sizes) + len(chosen.cases)
    ticks = iter(range(1, total + 1))

    def peaks_now() -> Peaks:
        return measure_peaks(
            wish.peak_sizes, seconds=wish.peak_seconds, done=lambda: progress(next(ticks), total)
        )

    progress(0, total)
    peaks = peaks_now()
    timed = []
    for case in chosen.cases:
        timed.append(_measure(runner, case, wish.seconds))
        progress(next(ticks), total)
    peaks = peaks.best_with(peaks_now())
    rows = [_row(case, found, work, peaks) for case, found in zip(chosen.cases, timed, strict=True)]
    settings = {
        **asdict(wish), "model": model.name, "kv_dtype": pages, "isa": isa(),
        "kv_bytes_per_token": layout.page_bytes / PAGE,
        "weight_bytes": None if work is None else work.weight_bytes,
    }  # fmt: skip
    return document("engine", settings, rows, about, peaks=peaks, skipped=list(chosen.skipped))


def _built(
    model: LoadedModel, layout: PageLayout, num_pages: int, wish: EngineWish
) -> tuple[ModelRunner, Work | None]:
    """A runner whose pages have something in them, and what its steps need."""
    pool = KVPool.create(layout, num_pages, pool_id=1)
    runner = ModelRunner(model, pool, threads=wish.threads, weights=wish.weights)
    fill = min(FILL_TOKENS, model.config.max_context)
    for plan in fill_plans(num_pages, fill, model.config.vocab_size):
        runner.execute(plan)
    return runner, work_of(runner.decoder, model.config, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """seconds: of each run. phases: seconds by phase in the shortest run, or None."""

    seconds: Sequence[float]
    phases: dict[str, float] | None


def _measure(runner: ModelRunner, case: Case, seconds: float) -> Timed:
    """Runs it again and again for so long. The first run does not count unless it took all the time."""
    plans = case.plans()
    spent: list[float] = []
    best: dict[str, float] | None = None
    first, phases = _once(runner, plans)
    if first >= seconds:
        return Timed(seconds=[first], phases=phases)
    end = time.monotonic() + seconds
    while not spent or time.monotonic() < end:
        took, phases = _once(runner, plans)
        if not spent or took < min(spent):
            best = phases
        spent.append(took)
    return Timed(seconds=spent, phases=best)


def _once(runner: ModelRunner, plans: Sequence[Any]) -> tuple[float, dict[str, float] | None]:
    clock = runner.phase_seconds
    if clock is not None:
        clock.take()
        clock.on = True
    begin = time.perf_counter()
    results = [runner.execute(plan) for plan in plans]
    took = time.perf_counter() - begin
    if any(result.failed for result in results):
        raise InternalError("The engine failed at a step of the benchmark; please report this.")
    if clock is None:
        return took, None
    clock.on = False
    phases = clock.take()
    return took, phases | {OTHER: took - sum(phases.values())}


def _row(case: Case, timed: Timed, work: Work | None, peaks: Peaks) -> dict[str, Any]:
    """As in the file: times in ms. floor_ms and share are None where the model's work is not known."""
    best = min(timed.seconds)
    floors = None if work is None else floor_seconds(work, case.rows(), peaks)
    floor = None if floors is None else sum(floors.values())
    phases = timed.phases or {}
    return {
        "name": case.name,
        "phase": case.phase,
        "context": case.context,
        "batch": case.batch,
        "runs": len(timed.seconds),
        "best_ms": best * 1e3,
        "median_ms": statistics.median(timed.seconds) * 1e3,
        "tokens_per_s": case.num_tokens / best,
        "floor_ms": None if floor is None else floor * 1e3,
        "share": None if floor is None else share(floor, best),
        "by_phase_ms": {name: phases[name] * 1e3 for name in (*PHASES, OTHER) if name in phases},
        "floor_by_phase_ms": None if floors is None else {n: s * 1e3 for n, s in floors.items()},
    }
