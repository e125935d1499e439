"""What integrity costs: GB/s of the page digest, and its share of the time to first token, on both sides.

What lives here: real workers in processes of their own whose digests are timed, a router, prompts one at a
time; progress on stderr, a table on stdout, JSON and a plot in benchmarks/results. What does not: how fast
pages move (`benchmarks.transfer`).

    python -m benchmarks.integrity [--tokens 1024 7900] [--rounds 3] [--ways shm tcp] [--out NAME]

Shares are of one request alone on idle workers: digest seconds (wall) over TTFT, and the CPU seconds of the
digest over all CPU seconds that both workers spent until the end. The digest runs beside compute and copies,
so what of it is on the critical path is less.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import re
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.machine import machine, now, us
from kvtransfer.digest import PageDigester, page_digest, page_header
from kvtransfer.mover import Copy, PageMover
from kvtransfer.tcp.reader import TcpPageReader
from pdserve.client import Client
from pdserve.config.worker import WorkerConfig
from pdserve.errors import Unavailable
from pdserve.types import Role

RESULTS, MODEL = Path(__file__).parent / "results", "smollm2-135m-instruct"
PAGE_BYTES = 368_640  # 16 tokens of the default model in bfloat16
EXTENT: dict[str, Any] = {"layout": "bench", "layer_first": 0, "layer_last": 29, "shard": 0}
START_S = 300.0
TARGET_SHARE, TARGET_GB_PER_S = 0.03, 10.0


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


# ---- the worker process: the production's, with its digests timed ------------------------------------------


class Meter:
    """Seconds and bytes of all digests of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """From now on."""
        self.sums = {"calls": 0.0, "bytes": 0.0, "wall_s": 0.0, "cpu_s": 0.0}

    def timed(self, size: int, work: Callable[[], Any]) -> Any:
        """Runs `work`, which digests so many bytes in this thread."""
        cpu, wall = time.thread_time(), time.perf_counter()
        result = work()
        spent = {"calls": 1, "bytes": size, "wall_s": time.perf_counter() - wall}
        spent["cpu_s"] = time.thread_time() - cpu
        with self._lock:
            for name, value in spent.items():
                self.sums[name] += value
        return result


def serve() -> None:
    """Runs a worker; "spent" on stdin is answered by what its digests and the process took since the last. On
    shm the whole pass that copies and digests is timed, under "pass_"; on tcp Python takes the pages here."""
    from pdserve.worker.host import WorkerHost

    digests, passes = Meter(), Meter()
    digest, move = PageDigester.__call__, PageMover.move

    def timed_digest(self: PageDigester, payload: memoryview, **facts: Any) -> bytes:
        result: bytes = digests.timed(len(payload), lambda: digest(self, payload, **facts))
        return result

    def timed_move(self: PageMover, budget_bytes: int) -> Any:
        return passes.timed(0, lambda: move(self, budget_bytes))

    PageDigester.__call__ = timed_digest  # type: ignore[method-assign]
    PageMover.move = timed_move  # type: ignore[method-assign]
    TcpPageReader.__init__ = partialmethod(TcpPageReader.__init__, compiled=False)  # type: ignore[assignment]
    host = WorkerHost(WorkerConfig.from_json(sys.stdin.readline()))
    host.start()
    print("serves", flush=True)
    before = time.process_time()
    for _ in sys.stdin:
        answer = {**digests.sums, **{f"pass_{name}": value for name, value in passes.sums.items()}}
        print(json.dumps({**answer, "process_cpu_s": time.process_time() - before}), flush=True)
        digests.reset()
        passes.reset()
        before = time.process_time()
    host.stop()


# ---- the measured fleet ------------------------------------------------------------------------------------


class Fleet:
    """A router, one prefill and one decode worker, over one transport."""

    def __init__(self, way: str) -> None:
        secret = secrets.token_hex(32)
        command = [sys.executable, "-m", "pdserve.cli", "router", "--port", "0", "--metrics-port", "0"]
        environ = {**os.environ, "PDSERVE_FLEET_SECRET": secret, "PDSERVE_ROUTER_HTTP": "false"}
        self._router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert self._router.stdout is not None
        found = re.search(r"listens on (\S+)", self._router.stdout.readline())
        assert found is not None
        self.address = found[1]
        self._workers = {role: self._start(role, secret, way) for role in (Role.PREFILL, Role.DECODE)}
        for worker in self._workers.values():
            assert worker.stdout is not None
            assert worker.stdout.readline() == "serves\n", "a worker did not start"
        self._wait_ready()

    def _start(self, role: Role, secret: str, way: str) -> subprocess.Popen[str]:
        config = WorkerConfig(
            worker_id=str(role), role=role, model=MODEL, fleet_secret=secret, transports=(way,),
            routers=(self.address,), threads=len(os.sched_getaffinity(0)), prefix_caching=False,
        )  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": str(config.threads), "OMP_WAIT_POLICY": "passive"}
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.integrity", "--serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(config.to_json() + "\n")
        process.stdin.flush()
        return process

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_S
        with Client(self.address) as client:
            while time.monotonic() < end:
                with contextlib.suppress(Unavailable):  # nobody has registered yet
                    client.generate(token_ids=range(100, 140), max_tokens=2).result()
                    return
                time.sleep(0.2)
        raise TimeoutError("the workers did not come to the router")

    def spent(self) -> dict[Role, dict[str, float]]:
        """What the workers' digests took since the last question, and their processes."""
        return {role: self._ask(worker) for role, worker in self._workers.items()}

    def _ask(self, worker: subprocess.Popen[str]) -> dict[str, float]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write("spent\n")
        worker.stdin.flush()
        answer: dict[str, float] = json.loads(worker.stdout.readline())
        return answer

    def stop(self) -> None:
        """Ends it."""
        for process in (*self._workers.values(), self._router):
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Seconds; digests by side."""

    ttft_s: float
    pages: int
    spent: dict[Role, dict[str, float]]

    def share(self, role: Role) -> float:
        """Of the time to first token, by the wall clock."""
        return self.spent[role]["wall_s"] / self.ttft_s

    def cpu_share(self) -> float:
        """Of all CPU seconds of both workers."""
        digest = sum(side["cpu_s"] for side in self.spent.values())
        return digest / sum(side["process_cpu_s"] for side in self.spent.values())

    def rate(self, role: Role) -> float:
        """GB/s by the digesting thread's CPU time; for a copy that digests, of both together."""
        spent = self.spent[role]
        return spent["bytes"] / spent.get("rate_cpu_s", spent["cpu_s"]) / 1e9


def settled(spent: dict[Role, dict[str, float]], pages: int, part: float) -> dict[Role, dict[str, float]]:
    """Decode's digests on shm are a part of its copies: as much as a copy without digest is faster."""
    decode = spent[Role.DECODE]
    if not decode["calls"]:
        decode |= {"bytes": pages * PAGE_BYTES, "calls": pages}
        decode |= {name: decode[f"pass_{name}"] * part for name in ("wall_s", "cpu_s")}
        decode["rate_cpu_s"] = decode["pass_cpu_s"]
    return spent


def ask(fleet: Fleet, tokens: int, seed: int, part: float) -> Sample:
    """One prompt of so many tokens. Raises RuntimeError if it was not a whole handover."""
    prompt = [100 + (seed * 7919 + i * 104729) % 40000 for i in range(tokens)]
    fleet.spent()
    with Client(fleet.address) as client:
        began, first = time.perf_counter(), 0.0
        with client.generate(token_ids=prompt, max_tokens=2, temperature=0.0, deadline_s=600.0) as stream:
            for _ in stream:
                first = first or time.perf_counter()
            ledger = stream.result().ledger
    assert ledger is not None
    pages = -(-tokens // 16)
    if ledger.transfer.pages != pages or ledger.decode_computed_prompt_tokens:
        raise RuntimeError("decode computed a part of the prompt")
    return Sample(ttft_s=first - began, pages=pages, spent=settled(fleet.spent(), pages, part))


def measure(ways: list[str], tokens: list[int], rounds: int, part: float) -> list[dict[str, Any]]:
    """A row for each way and length: medians over the rounds, one unmeasured first."""
    rows = []
    for way in ways:
        say(f"{way}: starting a router and two workers ...")
        fleet = Fleet(way)
        try:
            for length in tokens:
                samples = []
                for number in range(rounds + 1):
                    sample = ask(fleet, length, seed=number * 31 + length, part=part)
                    say(
                        f"{way} {length} tokens, round {number}/{rounds}: TTFT {sample.ttft_s * 1e3:.0f} ms, "
                        f"digest {100 * sample.share(Role.PREFILL):.2f} % + "
                        f"{100 * sample.share(Role.DECODE):.2f} %"
                    )
                    samples += [sample] if number else []
                rows.append(row(way, length, samples))
        finally:
            fleet.stop()
    return rows


def row(way: str, tokens: int, samples: list[Sample]) -> dict[str, Any]:
    """Medians."""

    def median(value: Callable[[Sample], float], digits: int = 5) -> float:
        return round(statistics.median(map(value, samples)), digits)

    return {
        "way": way, "tokens": tokens, "pages": samples[0].pages,
        "ttft_ms": median(lambda s: s.ttft_s * 1e3, 1),
        "source_ms": median(lambda s: s.spent[Role.PREFILL]["wall_s"] * 1e3, 2),
        "target_ms": median(lambda s: s.spent[Role.DECODE]["wall_s"] * 1e3, 2),
        "source_share": median(lambda s: s.share(Role.PREFILL)),
        "target_share": median(lambda s: s.share(Role.DECODE)),
        "cpu_share": median(Sample.cpu_share),
        "source_gb_per_s": median(lambda s: s.rate(Role.PREFILL), 1),
        "target_gb_per_s": median(lambda s: s.rate(Role.DECODE), 1),
    }  # fmt: skip


class Arena:
    """Page-sized pieces of much more memory than any cache."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        whole = memoryview(self._memory)
        np.frombuffer(whole, np.uint8)[:] = 7
        self.pages = [whole[at : at + PAGE_BYTES] for at in range(0, size_bytes - PAGE_BYTES + 1, PAGE_BYTES)]


def hash_alone(rounds: int, arena_bytes: int = 256 << 20) -> dict[str, float]:
    """GB/s in one thread: a page's digest where the page is in no cache (cold) and where it was used right
    before (warm), a plain read, and decode's copy out of a mapped pool without and with its digest."""
    source, target = Arena(arena_bytes), Arena(arena_bytes)
    words = [np.frombuffer(page, np.uint64) for page in source.pages]

    def digest(pages: list[memoryview]) -> Callable[[], Any]:
        return lambda: [page_digest(p, index=0, valid_rows=16, **EXTENT) for p in pages]

    cases: dict[str, Callable[[], Any]] = {
        "cold": digest(source.pages),
        "warm": digest(source.pages[:1] * len(source.pages)),
    }
    cases["plain_read"] = lambda: [int(w.max()) for w in words]
    for name, header in (("copy", None), ("copy_and_digest", page_header(**EXTENT))):
        cases[name] = _copier(source, target, header)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            began = time.thread_time()
            case()
            rate = len(source.pages) * PAGE_BYTES / (time.thread_time() - began) / 1e9
            say(f"hash alone, round {number}/{rounds}, {name}: {rate:.1f} GB/s")
            found[name] += [rate] if number else []
    return {name: round(statistics.median(rates), 1) for name, rates in found.items()}


def _copier(source: Arena, target: Arena, header: bytes | None) -> Callable[[], None]:
    """Copies all pages as a shm reader does; the source's generation never changes."""
    count = len(source.pages)
    mover = PageMover(page_bytes=PAGE_BYTES, capacity=count, header=header)
    generation = ctypes.c_uint64(1)
    copies = [
        Copy(
            source=ctypes.addressof(ctypes.c_char.from_buffer(there)), target=here,
            generation=ctypes.addressof(generation), wanted=1, index=number, valid_rows=16,
        )
        for number, (there, here) in enumerate(zip(source.pages, target.pages, strict=True))
    ]  # fmt: skip

    def run() -> None:
        generation.value = 1  # and keeps it alive
        mover.load(copies)
        while mover.busy:
            if any(copied.stale for copied in mover.move(8 << 20)):
                raise RuntimeError("a page was taken for stale")

    return run


def table(result: dict[str, Any]) -> None:
    """On stdout."""
    print("GB/s in one thread: " + ", ".join(f"{name} {rate}" for name, rate in result["alone"].items()))
    print("way  tokens  pages   TTFT ms   source ms (share, GB/s)    target ms (share, GB/s)    share of CPU")
    for r in result["rows"]:
        sides = "".join(
            f"{r[f'{side}_ms']:>9.1f} ({100 * r[f'{side}_share']:.2f} %, {r[f'{side}_gb_per_s']:.1f})   "
            for side in ("source", "target")
        )
        head = f"{r['way']:<4} {r['tokens']:>6} {r['pages']:>6} {r['ttft_ms']:>9.0f}  "
        print(f"{head}{sides}{100 * r['cpu_share']:>8.2f} %")


def plot(result: dict[str, Any], path: Path) -> None:
    """Shares beside the target, and rates."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    names = [f"{r['way']}\n{r['tokens']}" for r in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    at = np.arange(len(rows))
    for offset, side in ((-0.2, "source"), (0.2, "target")):
        left.bar(at + offset, [100 * r[f"{side}_share"] for r in rows], 0.38, label=side)
        right.bar(at + offset, [r[f"{side}_gb_per_s"] for r in rows], 0.38, label=side)
    left.axhline(100 * TARGET_SHARE, color="k", linestyle="--", label="target")
    right.axhline(TARGET_GB_PER_S, color="k", linestyle="--", label="target")
    left.set_ylabel("digest, % of TTFT")
    right.set_ylabel("GB/s per thread")
    for axis in (left, right):
        axis.set_xticks(at, names)
        axis.legend()
    figure.suptitle(f"Page digests, {result['machine']['cpu']}, {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description="what page digests cost")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 7900])
    parser.add_argument("--ways", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="integrity")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    alone = hash_alone(options.rounds)
    part = max(0.0, 1 - alone["copy_and_digest"] / alone["copy"])
    result: dict[str, Any] = {
        "date": now().isoformat(), "system": us(), "machine": machine(),
        "command": "python -m benchmarks.integrity " + " ".join(sys.argv[1:]), "alone": alone,
        "digest_part_of_a_copy": round(part, 4),
        "rows": measure(options.ways, options.tokens, options.rounds, part),
    }  # fmt: skip
    result["load_after"] = round(psutil.getloadavg()[0], 2)
    table(result)
    (RESULTS / f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, RESULTS / f"{options.out}.png")


if __name__ == "__main__":
    main()
