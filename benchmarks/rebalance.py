"""Steps of a worker of two ranks before, during and after its experts change places: does a rebalance stall?

    python -m benchmarks.rebalance [--experts 4] [--steps 300] [--seconds 60] [--threads N]

An upcycled default model with random experts in bfloat16, on real ranks: this process is the leader. Steps
of 8 decode rows follow each other without a pause. Loads are Zipf-like, drawn anew for each rebalance, so
that experts really move. Written: results/rebalance.json and .png. "Quiet" steps are the baseline: what they
take at most is the machine's doing, not a rebalance's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, now, us
from benchmarks.parallel import NUM_PAGES, PAGE, decode_plan
from pdserve.config.worker import WorkerConfig
from pdserve.models.loader import load_model
from pdserve.models.upcycle import Upcycling, upcycle
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Placement
from pdserve.ranks.children import launch_child
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.replica import Replica
from pdserve.ranks.runner import ParallelRunner
from pdserve.types import Role

MODEL, RANKS, SPARE = "smollm2-135m-instruct", 2, 1
RESULTS = Path(__file__).resolve().parent / "results"
PHASES = {"quiet": "#888888", "rebalance": "#e08a2b", "after": "#1f6fb2"}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="quiet steps before and after")
    parser.add_argument("--seconds", type=float, default=60.0, help="of rebalances, one after the other")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    facts = {"machine": machine(), "us": us(), "date": now().isoformat(), **vars(options)}
    with tempfile.TemporaryDirectory() as folder:
        made = Upcycling(num_experts=options.experts, top_k=2, noise=1.0)
        upcycle(load_model(MODEL, "bfloat16"), Path(folder) / "moe", made)
        with runner_of(Path(folder), options.experts, options.threads) as (runner, rebalancing):
            steps = measure(runner, rebalancing, options.steps, options.seconds)
            status = rebalancing.status
    lines = [{"phase": phase, **summary(took)} for phase, took in steps.items()]
    for line in lines:
        print(json.dumps(line), flush=True)
    done = {"outcomes": dict(status.outcomes), "copied_mb": round(status.copied_bytes / 1e6, 1)}
    print(json.dumps(done))
    write(steps, {**facts, **done, "lines": lines})
    print("written: benchmarks/results/rebalance.json and .png")
    return 0


@contextmanager
def runner_of(folder: Path, experts: int, threads: int) -> Iterator[tuple[ParallelRunner, Rebalancing]]:
    """Two ranks, warm."""
    config = WorkerConfig(
        worker_id="bench", role=Role.AGGREGATED, model=str(folder / "moe"), dtype="bfloat16",
        page_size=PAGE, num_pages=NUM_PAGES, tp=RANKS, threads=threads,
        expert_slots=-(-experts // RANKS) + SPARE,
    )  # fmt: skip
    replica = Replica.launch(config, str(folder), launch_child, print)
    try:
        runner, pool = replica.start(load_model(config.model, config.dtype), 1)
        replica.serve()
        assert runner.rebalancing is not None
        yield runner, runner.rebalancing
    finally:
        replica.close()
    pool.close()


def measure(
    runner: ParallelRunner, rebalancing: Rebalancing, count: int, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of each step, by phase."""
    for _ in range(20):
        step_ms(runner)
    quiet = [step_ms(runner) for _ in range(count)]
    during: list[float] = []
    seed, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        seed += 1
        table = target(rebalancing.status.table, seed)
        rebalancing.offer(table, table.copies_from(rebalancing.status.table))
        while rebalancing.busy:
            during.append(step_ms(runner))
    return {"quiet": quiet, "rebalance": during, "after": [step_ms(runner) for _ in range(count)]}


def step_ms(runner: ParallelRunner) -> float:
    """One step, orders of a rebalance included."""
    began = time.perf_counter()
    runner.execute(decode_plan())
    return 1000 * (time.perf_counter() - began)


def target(table: Placement, seed: int) -> Placement:
    """The planner's for loads that are drawn anew."""
    row = [100.0 / (rank + 1) ** 1.2 for rank in range(table.num_experts)]
    loads = [random.Random(seed + layer).sample(row, len(row)) for layer in range(table.num_layers)]
    return plan(loads, table.topology, table.slots_per_rank, current=table).table


def summary(took: Sequence[float]) -> dict[str, Any]:
    """Of one phase."""
    median = statistics.median(took)
    at = statistics.quantiles(took, n=1000)
    return {
        "steps": len(took),
        "median_ms": round(median, 2),
        "p99_ms": round(at[989], 2),
        "p999_ms": round(at[998], 2),
        "longest_ms": round(max(took), 2),
        "longest_over_median": round(max(took) / median, 2),
        "over_1.5_medians": sum(ms > 1.5 * median for ms in took),
    }


def write(steps: dict[str, list[float]], facts: dict[str, Any]) -> None:
    """results/rebalance.json and .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rebalance.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    figure, axis = pyplot.subplots(figsize=(9, 3.6))
    at = 0
    for phase, took in steps.items():
        axis.plot(range(at, at + len(took)), took, ".", markersize=2, color=PHASES[phase], label=phase)
        at += len(took)
    median = statistics.median(steps["quiet"])
    axis.axhline(1.5 * median, color="#bb3333", linewidth=0.8, label="1.5 x the quiet median")
    axis.set(xlabel="step", ylabel="ms", ylim=(0, max(3 * median, 1)))
    axis.legend(fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        f"Steps of two ranks while experts move, {facts['machine']['cpu']}, {facts['date'][:10]}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(RESULTS / "rebalance.png", dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
