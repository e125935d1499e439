"""Runs many seeds on the machine's cores, or one, by hand: `python -m tests.simulation.run --help`.

Prints progress with rate and time left, the coverage table at the end, and for the first failing seed its
trace and the command that replays it. Exit status 1 after a breach.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation import coverage
from tests.simulation.runner import Bias, Breach, run_seed

CHUNK = 10


@dataclass(slots=True)
class Sums:
    """What many runs were, together. failure: of the first breach, with its trace."""

    runs: int = 0
    events: int = 0
    requests: int = 0
    faults_struck: int = 0
    arrows: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    failed_seed: int | None = None
    failure: str = ""

    def add(self, other: Sums) -> None:
        self.runs += other.runs
        self.events += other.events
        self.requests += other.requests
        self.faults_struck += other.faults_struck
        self.arrows += other.arrows
        self.faults += other.faults
        self.counters += other.counters
        first = other.failed_seed
        if first is not None and (self.failed_seed is None or first < self.failed_seed):
            self.failed_seed, self.failure = first, other.failure


def replay(seed: int) -> str:
    """The command that runs one seed again."""
    return f"python -m tests.simulation.run --seed {seed} --trace"


def run_chunk(seeds: range, bias: Bias = Bias()) -> Sums:
    """Runs seeds one after the other; stops at the first breach."""
    sums = Sums()
    for seed in seeds:
        try:
            run = run_seed(seed, bias=bias)
        except Breach as breach:
            sums.failed_seed = seed
            sums.failure = f"{breach.trace}\n\n{breach}\nreplay: {replay(seed)}"
            return sums
        sums.add(
            Sums(
                runs=1, events=run.num_events, requests=run.num_requests, faults_struck=run.num_faults,
                arrows=run.arrows, faults=run.faults, counters=run.counters,
            )
        )  # fmt: skip
    return sums


def run_many(
    first: int, count: int, *, workers: int, on_progress: Callable[[Sums], None] = lambda sums: None
) -> Sums:
    """Runs seeds in processes of their own, until one fails."""
    total = Sums()
    chunks = _chunks(first, count)
    # Fresh interpreters: the caller may have threads, which a fork would not survive.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        pending: set[Future[Sums]] = set()
        while total.failed_seed is None:
            while len(pending) < 2 * workers and (chunk := next(chunks, None)) is not None:
                pending.add(pool.submit(run_chunk, chunk))
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                total.add(future.result())
            on_progress(total)
        for future in pending:
            future.cancel()
    return total


def _chunks(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, CHUNK):
        yield range(start, min(start + CHUNK, first + count))


class Bar:
    """One line that says how far it is."""

    def __init__(self, count: int, out: object = None) -> None:
        self._count, self._began = count, time.monotonic()
        self._out = out or sys.stderr
        self._shown = 0.0

    def __call__(self, sums: Sums) -> None:
        now = time.monotonic()
        if sums.runs < self._count and now - self._shown < 0.5:
            return
        self._shown = now
        rate = sums.runs / max(1e-9, now - self._began)
        left = (self._count - sums.runs) / rate if rate else 0.0
        filled = int(30 * sums.runs / self._count)
        line = f"\r[{'#' * filled:30}] {sums.runs:,}/{self._count:,} seeds  {rate:.1f}/s  {left:.0f} s left "
        print(line, end="" if sums.runs < self._count else "\n", file=self._out, flush=True)  # type: ignore[call-overload]


def one(seed: int, show_trace: bool) -> int:
    """Replays one seed."""
    try:
        run = run_seed(seed, trace=show_trace)
    except Breach as breach:
        print(breach.trace, breach, f"replay: {replay(seed)}", sep="\n")
        return 1
    if show_trace:
        print(run.trace)
    print(
        f"seed {seed}: good. {run.num_requests} requests, {run.num_events} events, {run.num_faults} faults, "
        f"{run.seconds:.1f} virtual seconds; {dict(run.counters)}"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="print the trace of --seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.seed is not None:
        return one(asked.seed, asked.trace)
    sums = run_many(asked.first, asked.seeds, workers=asked.workers, on_progress=Bar(asked.seeds))
    print(coverage.table(sums.arrows, sums.faults))
    print(f"\n{sums.runs:,} seeds, {sums.requests:,} requests, {sums.events:,} events")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(sums.counters.items())))
    if sums.failed_seed is not None:
        print(f"\n{sums.failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
