"""Time of whole engine steps by form of the weights: decode of 1, 8 and 32 sequences, and a prefill of 1,024.

    python -m benchmarks.steps [--threads N] [--forms exact,w8a8,w4a8] [--steps decode-1,...] [--seconds S]

One process, forms in turns, so that what else runs on the machine meets all alike. "operators" is exact
weights with one call of the library for each operator, as models run that can not be one (`models.fused`).
"""

from __future__ import annotations

import argparse
import statistics
import time

from pdserve.bench.steps import DECODE, PAGE, PREFILL, Case
from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kernels import native
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model

MODEL, PAGES = "smollm2-135m-instruct", 1024
CONTEXT = 300
OPERATORS = "operators"


CASES = (
    *(Case(phase=DECODE, context=CONTEXT, batch=batch) for batch in (1, 8, 32)),
    Case(phase=PREFILL, context=1024, chunk=1024),
)


def name_of(case: Case) -> str:
    """As --steps has it."""
    return f"{case.phase}-{case.context if case.phase == PREFILL else case.batch}"


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
    (plan,) = case.plans()
    times: dict[str, list[float]] = {form: [] for form in made}
    for runner in made.values():
        runner.execute(plan)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for form, runner in made.items():
            for _ in range(1 if case.phase == PREFILL else 5):
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
    parser.add_argument("--steps", default=",".join(name_of(case) for case in CASES))
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    made = runners(options.forms.split(","), options.threads)
    print(f"{native.isa()}, {options.threads} threads, {MODEL} bfloat16, context {CONTEXT}")
    print(f"{'step':14}{'form':11}{'best ms':>9}{'median':>9}{'tok/s':>8}{'x first':>9}")
    for case in CASES:
        if name_of(case) not in options.steps.split(","):
            continue
        first = 0.0
        for form, times in measure(case, made, options.seconds).items():
            median = statistics.median(times)
            first = first or median
            rate = case.num_tokens / median
            ms = f"{min(times) * 1e3:9.2f}{median * 1e3:9.2f}"
            print(f"{name_of(case):14}{form:11}{ms}{rate:8.0f}{first / median:9.2f}", flush=True)


if __name__ == "__main__":
    main()
