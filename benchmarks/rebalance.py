"""Steps of a worker of two ranks while its experts change places, and while they do not: does it stall?

    python -m benchmarks.rebalance [--experts 4] [--seconds 60] [--threads N] [--pin]

An upcycled default model with random experts in bfloat16, on real ranks: this process is the leader. Steps
of 8 decode rows follow each other without a pause. Loads are Zipf-like, drawn anew for each rebalance, so
that experts really move. Before each rebalance there are as many quiet steps as the last one took, with the
same tables: their longest is what the machine does to a step, and a rebalance adds what is beyond it. The
first rebalance is not measured: with it come replicas, and 8 rows then read more weights.

"near" is a step over the median of the 10 before and the 10 after it: a machine that is slow for seconds does
not show in it, a step that a rebalance makes long does.

"cpu" is the processor time of the busiest rank, ferry included: what a step had to do, whoever else wanted
the cores. "others" is the share of the cores that processes which are none of ours had; "alone" are steps in
which they had less than a quarter of a quiet step. --pin: each rank on cores of its own; else the system may
put both on one for a while. Written: results/rebalance.json and .png.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

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
COLOURS = {"quiet": "#888888", "copying": "#e08a2b", "canary": "#1f6fb2", "swap": "#3a9a5b"}
LONG = 1.5
"""A step of more medians than this is a long one."""
NEAR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. kind: "quiet", or what a rebalance did with it. idle_ms, busy_ms: of all cores together."""

    kind: str
    ms: float
    cpu_ms: float
    ours_ms: float
    idle_ms: float
    busy_ms: float
    near: float = 1.0

    @property
    def others_ms(self) -> float:
        """Of other processes, to ten milliseconds or so."""
        return max(0.0, self.busy_ms - self.ours_ms)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="quiet steps before the first rebalance")
    parser.add_argument("--seconds", type=float, default=60.0, help="of quiet steps and rebalances in turns")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pin", action="store_true", help="each rank on cores of its own")
    options = parser.parse_args(argv)
    facts = {"machine": machine(), "us": us(), "date": now().isoformat(), **vars(options)}
    with tempfile.TemporaryDirectory() as folder:
        made = Upcycling(num_experts=options.experts, top_k=2, noise=1.0)
        upcycle(load_model(MODEL, "bfloat16"), Path(folder) / "moe", made)
        with runner_of(Path(folder), options.experts, options.threads) as (runner, rebalancing):
            if options.pin:
                pin()
            steps = measure(runner, rebalancing, options.steps, options.seconds)
            status = rebalancing.status
    lines = summaries(steps)
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


def pin() -> None:
    """All threads of each rank's process to its part of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // RANKS
    for rank, process in enumerate(ranks()):
        own = cores[rank * share : (rank + 1) * share]
        for thread in process.threads():
            os.sched_setaffinity(thread.id, own)


def ranks() -> list[psutil.Process]:
    """Their processes: we are rank 0."""
    here = psutil.Process()
    return [here, *(child for child in here.children() if "pdserve.ranks" in child.cmdline())]


def measure(runner: ParallelRunner, rebalancing: Rebalancing, count: int, seconds: float) -> list[Step]:
    """Quiet steps and rebalances in turns."""
    clock = StepClock(runner, rebalancing)
    move(clock, rebalancing, 0)
    steps: list[Step] = []
    seed, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        steps += [clock.step() for _ in range(count)]
        seed += 1
        moved = move(clock, rebalancing, seed)
        steps += moved
        count = len(moved)
    return with_near(steps)


def move(clock: StepClock, rebalancing: Rebalancing, seed: int) -> list[Step]:
    """One rebalance."""
    table = target(rebalancing.status.table, seed)
    rebalancing.offer(table, table.copies_from(rebalancing.status.table))
    steps: list[Step] = []
    while rebalancing.busy:
        steps.append(clock.step())
    return steps


def with_near(steps: Sequence[Step]) -> list[Step]:
    """Each beside its neighbours."""
    took = [step.ms for step in steps]
    around = (took[max(0, n - NEAR) : n] + took[n + 1 : n + 1 + NEAR] for n in range(len(steps)))
    return [replace(s, near=s.ms / statistics.median(a)) for s, a in zip(steps, around, strict=True)]


class StepClock:
    """Measures one step after the other, orders of a rebalance included."""

    def __init__(self, runner: ParallelRunner, rebalancing: Rebalancing) -> None:
        self._runner, self._rebalancing = runner, rebalancing
        # What clock_getcpuclockid(3) gives for a process.
        self._clocks = [(~process.pid << 3) | 2 for process in ranks()]
        self._plan = decode_plan()

    def step(self) -> Step:
        """One more."""
        busy = self._rebalancing.busy
        cpu, cores = self._cpu(), psutil.cpu_times()
        began = time.perf_counter()
        self._runner.execute(self._plan)
        ms = 1000 * (time.perf_counter() - began)
        used = [1000 * (after - before) for after, before in zip(self._cpu(), cpu, strict=True)]
        spent = {
            name: 1000 * (after - before)
            for name, after, before in zip(cores._fields, psutil.cpu_times(), cores, strict=True)
        }
        idle = spent["idle"] + spent["iowait"]
        return Step(
            kind=self._kind() if busy else "quiet", ms=ms, cpu_ms=max(used), ours_ms=sum(used),
            idle_ms=idle, busy_ms=sum(spent.values()) - idle,
        )  # fmt: skip

    def _cpu(self) -> list[float]:
        return [time.clock_gettime(clock) for clock in self._clocks]

    def _kind(self) -> str:
        orders = self._rebalancing.ordered
        return "canary" if "try" in orders else "swap" if "install" in orders else "copying"


def target(table: Placement, seed: int) -> Placement:
    """The planner's for loads that are drawn anew."""
    row = [100.0 / (rank + 1) ** 1.2 for rank in range(table.num_experts)]
    loads = [random.Random(seed + layer).sample(row, len(row)) for layer in range(table.num_layers)]
    return plan(loads, table.topology, table.slots_per_rank, current=table).table


def summaries(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Of quiet steps, of equally many in rebalances, and of the kinds of these."""
    quiet = [step for step in steps if step.kind == "quiet"]
    moving = [step for step in steps if step.kind != "quiet"]
    count = min(len(quiet), len(moving))
    base = quiet[:count]
    lines = [
        {"steps": "quiet", **summary(base, base)},
        {"steps": "rebalance", **summary(moving[:count], base)},
    ]
    for kind in list(COLOURS)[1:]:
        some = [step for step in moving if step.kind == kind]
        lines.append({"steps": f"rebalance, {kind}", **summary(some, base)})
    return lines


def summary(some: Sequence[Step], quiet: Sequence[Step]) -> dict[str, Any]:
    """Medians are the quiet steps'. longest: of which it can be seen what it waited for."""
    took, median = sorted(step.ms for step in some), statistics.median(step.ms for step in quiet)
    cpu, cpu_median = [step.cpu_ms for step in some], statistics.median(step.cpu_ms for step in quiet)
    longest = max(some, key=lambda step: step.ms)
    alone = [step.ms for step in some if step.others_ms < median / 4]
    over = sum(ms > LONG * median for ms in took)
    return {
        "count": len(some),
        "median_ms": round(statistics.median(took), 2),
        "p99_ms": round(took[int(0.99 * len(took))], 2),
        "p999_ms": round(took[int(0.999 * len(took))], 2),
        "longest_ms": round(longest.ms, 2),
        "median_over_quiet": round(statistics.median(took) / median, 3),
        "longest_over_quiet_median": round(longest.ms / median, 2),
        "over_1.5_quiet_medians": over,
        "share_over_1.5": round(over / len(some), 4),
        "alone": len(alone),
        "longest_alone_over_quiet_median": round(max(alone) / median, 2),
        "over_1.5_alone": sum(ms > LONG * median for ms in alone),
        "longest_near": round(max(step.near for step in some), 2),
        "near_over_1.5": sum(step.near > LONG for step in some),
        "cpu_median_over_quiet": round(statistics.median(cpu) / cpu_median, 3),
        "cpu_longest_over_quiet_median": round(max(cpu) / cpu_median, 2),
        "others": round(sum(s.others_ms for s in some) / sum(s.busy_ms + s.idle_ms for s in some), 3),
        "longest": {
            "cpu_ms": round(longest.cpu_ms, 1),
            "idle_ms": round(longest.idle_ms),
            "others_ms": round(longest.others_ms),
        },
    }


def write(steps: Sequence[Step], facts: dict[str, Any]) -> None:
    """results/rebalance.json and .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rebalance.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    figure, axis = pyplot.subplots(figsize=(9, 3.6))
    for kind, colour in COLOURS.items():
        at = [(n, step.ms) for n, step in enumerate(steps) if step.kind == kind]
        axis.plot(*zip(*at, strict=True), ".", markersize=2.5, color=colour, label=kind)
    median = statistics.median(step.ms for step in steps if step.kind == "quiet")
    axis.axhline(LONG * median, color="#bb3333", linewidth=0.8, label="1.5 x the quiet median")
    axis.set(xlabel="step", ylabel="ms", ylim=(0, max(3 * median, 1)))
    axis.legend(fontsize=7, ncols=len(COLOURS) + 1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        f"Steps of two ranks while experts move, {facts['machine']['cpu']}, {facts['date'][:10]}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(RESULTS / "rebalance.png", dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
