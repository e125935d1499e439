"""Two worker processes on the same cores: what OpenMP's waiting and nice values do to decode's steps.

    python -m benchmarks.colocation

One process does the matrix products of prefill steps (1,024 rows), the other those of decode steps (32 rows),
in bfloat16, in the shapes of the default model. No engine, no Ray: only the effect of the settings. The table
of docs/decisions/0003-ray.md comes from here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

LAYERS = 30
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
"""Input and output width of a layer's products: q+k+v, o, gate+up, down."""
STEPS = {"prefill": (12, 1024), "decode": (120, 32)}
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One row of the table. threads: of each process. nice: of prefill. pinned: one core each."""

    name: str
    environ: dict[str, str]
    threads: int
    nice: int = 0
    pinned: bool = False
    apart: bool = False


def modes(cores: int) -> list[Mode]:
    """The rows, for a machine with so many cores."""
    return [
        Mode(name="one after the other", environ=PASSIVE, threads=cores, apart=True),
        Mode(name="together, OpenMP default", environ={}, threads=cores),
        Mode(name="together, passive", environ=PASSIVE, threads=cores),
        Mode(name="together, passive, prefill at nice 10", environ=PASSIVE, threads=cores, nice=10),
        Mode(name="half the cores each, pinned", environ=PASSIVE, threads=max(1, cores // 2), pinned=True),
    ]


def child(role: str, nice: int, pinned: bool) -> None:
    """Warms up, says so, waits for a line, runs its steps, prints their seconds as JSON."""
    os.nice(nice if role == "prefill" else 0)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if pinned:
        os.sched_setaffinity(0, cores[:half] if role == "prefill" else cores[half:])
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    weights = [torch.randn(out, width).bfloat16() for _ in range(LAYERS) for width, out in SHAPES]
    steps, rows = STEPS[role]
    inputs = {width: torch.randn(rows, width).bfloat16() for width, _ in SHAPES}

    def step() -> float:
        began = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        return time.perf_counter() - began

    for _ in range(3):
        step()
    print("warm", flush=True)
    sys.stdin.readline()
    print(json.dumps([step() for _ in range(steps)]), flush=True)


def start(role: str, mode: Mode) -> subprocess.Popen[str]:
    """A warm process that waits for its start."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith("OMP_")} | mode.environ
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.colocation", role, str(mode.nice), str(int(mode.pinned))],
        env=environ | {"OMP_NUM_THREADS": str(mode.threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def finish(process: subprocess.Popen[str]) -> list[float]:
    """Its step times in seconds."""
    found: list[float] = json.loads(process.communicate()[0])
    return found


def go(process: subprocess.Popen[str]) -> None:
    """Lets it run."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def measure(mode: Mode) -> dict[str, Any]:
    """Total seconds, and decode's 99th percentile in milliseconds."""
    pair = {role: start(role, mode) for role in STEPS}
    began = time.perf_counter()
    times: dict[str, list[float]] = {}
    for role, process in pair.items():
        go(process)
        if mode.apart:
            times[role] = finish(process)
    times |= {role: finish(process) for role, process in pair.items() if role not in times}
    total, decode = time.perf_counter() - began, sorted(times["decode"])
    return {"total_s": total, "decode_p99_ms": decode[int(0.99 * (len(decode) - 1))] * 1e3}


def main(rounds: int = 3) -> None:
    """Prints the median of some interleaved rounds as a Markdown table."""
    table = modes(len(os.sched_getaffinity(0)))
    runs: dict[str, list[dict[str, Any]]] = {mode.name: [] for mode in table}
    for number in range(rounds):
        for mode in table:
            runs[mode.name].append(measure(mode))
            print(
                f"round {number + 1}/{rounds}: {mode.name}: {runs[mode.name][-1]}",
                file=sys.stderr,
                flush=True,
            )
    print("| two processes | total s | decode step p99 ms |\n|---|---|---|")
    for name, found in runs.items():
        total, p99 = (sorted(run[key] for run in found)[rounds // 2] for key in ("total_s", "decode_p99_ms"))
        print(f"| {name} | {total:.1f} | {p99:.0f} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
    else:
        main()
