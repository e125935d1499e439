"""Command line of the transfer benchmark: runs all ways, interleaved, shows and writes what was found.

    python -m benchmarks.transfer [--page-kib 360] [--pages 128] [--rounds 15] [--json FILE]

What lives here: the rounds and their clock. What does not: the ways (`ways`), the table (`report`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, now, us
from benchmarks.transfer import latency, report
from benchmarks.transfer.source import Remote, layout, running, serve
from benchmarks.transfer.ways import Target, all_ways, digest_rates
from pdserve.garbage import keep_what_is_loaded


def clocked(calls: Mapping[str, Callable[[], None]], rounds: int, cpu: Callable[[], float]) -> Any:
    """Seconds of each call in each round, and its CPU seconds in all. The calls are interleaved, in each
    round in a new order, since each leaves the caches to the next; the first round does not count."""
    chance = random.Random(1)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for number in range(rounds + 1):
        for name in chance.sample(list(calls), len(calls)):
            before, begin = cpu(), time.perf_counter()
            calls[name]()
            took = time.perf_counter() - begin
            if number:
                seconds[name].append(took)
                spent[name] += cpu() - before
        print(f"\rround {number}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds, spent


def measure(remote: Remote, page_kib: int, num_pages: int, rounds: int) -> dict[str, Any]:
    """Everything, in one run."""
    target, size_bytes = Target.make(page_kib, num_pages), num_pages * layout(page_kib).page_bytes
    with all_ways(remote, page_kib, target) as ways:
        calls = {way.name: way.pull for way in ways}
        keep_what_is_loaded()  # as a worker does
        seconds, cpu = clocked(calls, rounds, lambda: time.process_time() + remote.ask()[0])
        rows = report.rows(ways, seconds, cpu, size_bytes)
    digests, _ = clocked(digest_rates(target, layout(page_kib).fingerprint()), rounds, time.process_time)
    print("one page at a time ...", file=sys.stderr, flush=True)
    return {
        "page_bytes": target.page_bytes,
        "pages": num_pages,
        "rounds": rounds,
        "rows": rows,
        "digest_gb_per_s": {
            name: round(size_bytes / statistics.median(found) / 1e9, 1) for name, found in digests.items()
        },
        "latency_us": latency.measure(remote, page_kib, target, 20 * rounds),
    }


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description="GB/s and latency of the KV data plane on this machine")
    parser.add_argument("--page-kib", type=int, default=360, help="the default model's page: 16 tokens, bf16")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="in place of benchmarks/results/transfer.json")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.page_kib, options.pages, options.serve)
        return
    facts = {"machine": machine(), "versions": us(), "date": now().isoformat()}
    facts["command"] = "python -m benchmarks.transfer " + " ".join(sys.argv[1:])
    print(
        f"source process with {options.pages} pages of {options.page_kib} KiB ...",
        file=sys.stderr,
        flush=True,
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        running(options.page_kib, options.pages, Path(directory)) as remote,
    ):
        result = facts | measure(remote, options.page_kib, options.pages, options.rounds)
    report.show(result)
    report.write(result, options.json)


if __name__ == "__main__":
    main()
