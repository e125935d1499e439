"""How much of a transfer hides behind compute, and what a handover costs: one prefill and one decode worker
over shm and tcp beside one aggregated worker, one request at a time, interleaved.

    python -m benchmarks.handover [--quick] [--pairs 15] [--lengths 1024,4096,7900] [--against TREE]

Per-request figures are the latency ledger's (docs/ledger.md); TTFT is the client's. Prompts are random
tokens, new in each pair and the same for all systems of a pair. `--against` runs the stacks of another
checkout in the same run. Writes benchmarks/results/handover.json and .png, or partial-handover.* for a run
with other flags.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.handover_plot import plot
from benchmarks.stack import ROOT, Stack, describe
from pdserve.client import Result
from pdserve.config import ServeConfig
from pdserve.obs.ledger import path_seconds

RESULTS = Path(__file__).resolve().parent / "results"
LENGTHS = (1024, 4096, 7900)
PAIRS, QUICK_PAIRS, QUICK_LENGTHS = 15, 3, (1024, 2048)
MAX_TOKENS = 4
SETTLE_S = 1.2
"""Two heartbeats: then the router knows what its workers hold."""
FIRST_ID, LAST_ID = 100, 40000
TRANSPORTS = ("shm", "tcp")
BASE = "aggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Milliseconds; hidden: share of the wire's busy time before the last chunk's end.

    cpu_ms: of all processes; it says what a handover costs even where others keep the machine busy.
    """

    ttft_ms: float
    cpu_ms: float
    handover_ms: float | None
    hidden: float | None
    phases_ms: dict[str, float]
    pages: int
    path: str


@dataclass(slots=True)
class System:
    """A stack under measurement, with its samples by prompt length."""

    name: str
    stack: Stack
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)


def config_of(name: str) -> ServeConfig:
    """As `pdserve up` would have it."""
    if name == BASE:
        return ServeConfig(aggregated=1).resolved()
    return ServeConfig(prefill=1, decode=1, transport=name).resolved()


@contextmanager
def systems(against: Path | None) -> Iterator[list[System]]:
    """All stacks, started one after the other."""
    trees = {"": ROOT} | ({"@other": against.resolve()} if against else {})
    found: list[System] = []
    with ExitStack() as stack:
        for mark, tree in trees.items():
            for name in (BASE, *TRANSPORTS):
                say(f"starting {name}{mark} ...")
                one = Stack(config_of(name), tree)
                stack.callback(one.stop)
                found.append(System(name + mark, one))
        yield found


def measure(system: System, prompt: Sequence[int]) -> Sample:
    """One request, alone on its stack."""
    used_s, began = system.stack.cpu_s(), time.perf_counter()
    stream = system.stack.client.generate(
        token_ids=prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, deadline_s=300.0
    )
    next(iter(stream))
    ttft_ms = (time.perf_counter() - began) * 1e3
    result = stream.result()
    return _sample(result, ttft_ms, (system.stack.cpu_s() - used_s) * 1e3)


def _sample(result: Result, ttft_ms: float, cpu_ms: float) -> Sample:
    ledger = result.ledger
    moved = ledger.transfer.path != ""
    if moved and ledger.decode_computed_prompt_tokens:
        raise RuntimeError("decode computed a part of the prompt: this is no measurement of a handover")
    return Sample(
        ttft_ms=ttft_ms,
        cpu_ms=cpu_ms,
        handover_ms=ledger.handover_s * 1e3 if moved and ledger.handover_s is not None else None,
        hidden=ledger.wire_hidden if moved else None,
        phases_ms={str(phase): seconds * 1e3 for phase, seconds in path_seconds(ledger).items()},
        pages=ledger.transfer.pages,
        path=ledger.transfer.path,
    )


def run_length(found: list[System], length: int, pairs: int, seed: random.Random) -> None:
    """Pairs of one prompt length; the first does not count. The order changes from pair to pair."""
    for number in range(pairs + 1):
        prompt = [seed.randint(FIRST_ID, LAST_ID) for _ in range(length)]
        told = []
        for system in found[number % len(found) :] + found[: number % len(found)]:
            sample = measure(system, prompt)
            if number:
                system.samples.setdefault(length, []).append(sample)
            told.append(f"{system.name} {sample.ttft_ms:.0f}")
        say(f"{length:>5} tokens, pair {number}/{pairs}, TTFT ms: " + "  ".join(told))
    time.sleep(SETTLE_S)
    for system in found:
        # A peak since the start: lengths grow, so it is this length's.
        system.peak_bytes[length] = max(
            worker.load.peak_transfer_pages * worker.record.capability.page_bytes
            for worker in system.stack.status().workers
        )


def line(system: System, base: System, length: int) -> dict[str, Any]:
    """The figures of one system at one length."""
    samples = system.samples[length]
    handover = sorted(s.handover_ms for s in samples if s.handover_ms is not None)
    hidden = [s.hidden for s in samples if s.hidden is not None]
    pairs = list(zip(samples, base.samples[length], strict=True))
    names = {name for sample in samples for name in sample.phases_ms}
    return {
        "system": system.name,
        "length": length,
        "pairs": len(samples),
        "ttft_ms": statistics.median(s.ttft_ms for s in samples),
        "ttft_ratio": statistics.median(mine.ttft_ms / other.ttft_ms for mine, other in pairs),
        "cpu_ms": statistics.median(s.cpu_ms for s in samples),
        "cpu_ratio": statistics.median(mine.cpu_ms / other.cpu_ms for mine, other in pairs),
        "hidden": statistics.median(hidden) if hidden else None,
        "handover_p50_ms": quantile(handover, 0.5),
        "handover_p90_ms": quantile(handover, 0.9),
        "pages": samples[0].pages,
        "paths": sorted({s.path for s in samples}),
        "peak_held_bytes": system.peak_bytes[length],
        "phases_ms": {n: statistics.median(s.phases_ms.get(n, 0.0) for s in samples) for n in sorted(names)},
        "samples": {
            "ttft_ms": [round(s.ttft_ms, 2) for s in samples],
            "cpu_ms": [round(s.cpu_ms, 2) for s in samples],
            "handover_ms": [round(value, 3) for value in handover],
            "hidden": [round(value, 4) for value in hidden],
        },
    }


def quantile(ordered: list[float], share: float) -> float | None:
    """The value below which that share lies; None of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def show(lines: Sequence[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'system':<18}{'tokens':>7}{'TTFT ms':>9}{'ratio':>7}{'CPU ms':>9}{'ratio':>7}{'hidden':>8}"
          f"{'handover p50':>14}{'p90 ms':>8}{'held MiB':>10}")  # fmt: skip
    for each in lines:
        moved = each["handover_p50_ms"] is not None
        print(
            f"{each['system']:<18}{each['length']:>7}{each['ttft_ms']:>9.1f}{each['ttft_ratio']:>6.3f}x"
            f"{each['cpu_ms']:>9.1f}{each['cpu_ratio']:>6.3f}x"
            + (f"{each['hidden']:>8.1%}{each['handover_p50_ms']:>14.2f}{each['handover_p90_ms']:>8.2f}"
               f"{each['peak_held_bytes'] / 2**20:>10.1f}" if moved else "")
        )  # fmt: skip
        phases = "  ".join(f"{name} {value:.2f}" for name, value in each["phases_ms"].items())
        print(f"    on the path, ms: {phases}", flush=True)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description="what a handover costs on this machine")
    parser.add_argument("--quick", action="store_true", help="few pairs of short prompts")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--lengths", type=lambda text: tuple(int(part) for part in text.split(",")))
    parser.add_argument("--against", type=Path, help="another checkout, measured in the same run")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the stacks, too
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    pairs = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    facts = {"machine": machine.machine(), "date": machine.now().isoformat(), "version": machine.us()}
    facts["command"] = "python -m benchmarks.handover " + " ".join(sys.argv[1:])
    seed = random.Random(options.seed)
    with systems(options.against) as found:
        lines: list[dict[str, Any]] = []
        for length in lengths:
            run_length(found, length, pairs, seed)
            lines += [line(system, found[0], length) for system in found]
            show(lines[-len(found) :])
        facts["flags"] = {name: describe(config_of(name)) for name in (BASE, *TRANSPORTS)}
    complete = tuple(lengths) == LENGTHS and pairs >= PAIRS and options.against is None
    target = RESULTS / ("handover" if complete else "partial-handover")
    target.with_suffix(".json").write_text(json.dumps(facts | {"lines": lines}, indent=1) + "\n")
    plot(lines, facts, target.with_suffix(".png"))
    say(f"written: benchmarks/results/{target.name}.json and .png")


if __name__ == "__main__":
    main()
