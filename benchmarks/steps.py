"""Time of whole engine steps by form of the weights: decode of 1, 8 and 32 sequences, and a prefill of 1,024.

    python -m benchmarks.steps [--threads N] [--forms exact,w8a8,w4a8] [--steps decode-1,...] [--seconds S]

One process, forms in turns, so that what else runs on the machine meets all alike. "operators" is exact
weights with one call of the library for each operator, as models run that can not be one (`models.fused`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kernels import native
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams

MODEL, PAGE, PAGES = "smollm2-135m-instruct", 16, 1024
CONTEXT = 300
OPERATORS = "operators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step. rows: new tokens of each sequence; contexts: with them."""

    name: str
    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    def plan(self) -> StepPlan:
        """On pages of its own for each sequence."""
        seqs, page = [], 0
        for i, (rows, context) in enumerate(zip(self.rows, self.contexts, strict=True)):
            pages = tuple(range(page, page + -(-context // PAGE)))
            page += len(pages)
            seqs.append(
                SeqStep(
                    seq_id=str(i),
                    token_ids=tuple((7 * row + i) % 40000 for row in range(rows)),
                    start=context - rows,
                    pages=pages,
                    sample=True,
                    sample_counter=0,
                    sampling=SamplingParams(),
                )
            )
        return StepPlan(step_id=0, seqs=tuple(seqs))


CASES = (
    *(Case(name=f"decode-{n}", rows=(1,) * n, contexts=(CONTEXT,) * n) for n in (1, 8, 32)),
    Case(name="prefill-1024", rows=(1024,), contexts=(1024,)),
)


def runners(forms: list[str], threads: int) -> dict[str, ModelRunner]:
    """A runner and pool for each form."""
    made = {}
    for form in forms:
        weights = "exact" if form == OPERATORS else form
        model = load_model(MODEL, keep_quantised=weights != "exact")
        layout = page_layout(model.config, page_size=PAGE, dtype="bfloat16")
        pool = KVPool.create(layout, PAGES, pool_id=1)
        made[form] = ModelRunner(model, pool, threads=threads, weights=weights)
        if form == OPERATORS:
            made[form]._model = made[form].decoder
    return made


def measure(case: Case, made: dict[str, ModelRunner], seconds: float) -> dict[str, list[float]]:
    """Seconds of each step, by form; all forms get as many."""
    plan = case.plan()
    times: dict[str, list[float]] = {form: [] for form in made}
    for runner in made.values():
        runner.execute(plan)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for form, runner in made.items():
            for _ in range(1 if case.rows[0] > 1 else 5):
                begin = time.perf_counter()
                runner.execute(plan)
                times[form].append(time.perf_counter() - begin)
    return times


def main() -> None:
    """Print the table as it grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forms", default=f"{OPERATORS},exact,w8a8,w4a8")
    parser.add_argument("--steps", default=",".join(case.name for case in CASES))
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    made = runners(options.forms.split(","), options.threads)
    print(f"{native.isa()}, {options.threads} threads, {MODEL} bfloat16, context {CONTEXT}")
    print(f"{'step':14}{'form':11}{'best ms':>9}{'median':>9}{'tok/s':>8}{'x first':>9}")
    for case in CASES:
        if case.name not in options.steps.split(","):
            continue
        first = 0.0
        for form, times in measure(case, made, options.seconds).items():
            median = statistics.median(times)
            first = first or median
            rate = sum(case.rows) / median
            ms = f"{min(times) * 1e3:9.2f}{median * 1e3:9.2f}"
            print(f"{case.name:14}{form:11}{ms}{rate:8.0f}{first / median:9.2f}", flush=True)


if __name__ == "__main__":
    main()
