"""How long `pdserve up` takes until it is ready, at the first start on a machine and later, and what memory a
worker has then.

    python -m benchmarks.startup [--precision exact,fast] [--starts 3]

The first start has an empty cache: it compiles our C++. Memory is PSS after a few requests, from
/proc/PID/smaps of each worker: the pages of its pool, the weights it computes with (their bytes in a model
built here in the same form), and the rest: torch, Ray, gRPC, Python, buffers. Writes
benchmarks/results/startup.json; a run of some precisions keeps what is there of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from pdserve.client import Client
from pdserve.config.precision import PRECISIONS, Wish
from pdserve.config.serve import DEFAULT_MODEL
from pdserve.models.build import build_decoder
from pdserve.models.loader import load_model
from pdserve.models.precision import packer
from pdserve.types import Role, WorkerRecord
from pdserve.worker.precision import chosen

RESULTS = Path(__file__).resolve().parent / "results" / "startup.json"
BARS = {"ready_s": 20.0, "rest_mb": 600.0}
GOALS = {"ready_s": 12.0, "rest_mb": 400.0}
PROMPT_TOKENS, MAX_TOKENS, REQUESTS = 1024, 32, 4
MB = 2**20
_READY = re.compile(r"ready on (\S+) after [\d.]+ s \((.*)\)")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one worker, in MiB. total: its PSS; total = pool + weights + rest."""

    role: str
    form: str
    total_mb: float
    pool_mb: float
    weights_mb: float
    rest_mb: float


@contextmanager
def served(precision: str, cache: str) -> Iterator[tuple[str, float, str]]:
    """A running `pdserve up`: (address, seconds until it said so, its own words on where they went)."""
    command = [sys.executable, "-m", "pdserve.cli", "up", "--precision", precision]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", "0", "--metrics-port", "0", "--http-port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ | {"XDG_CACHE_HOME": cache},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := _READY.search(line):
                yield found[1], time.perf_counter() - began, found[2]
                return
        raise SystemExit("pdserve up did not start:\n" + "".join(said))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def pss(pid: int) -> tuple[int, int]:
    """(bytes in all, bytes of the page pool's mapping) of a process."""
    total = pool = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            name = found[1]
        elif line.startswith("Pss:"):
            size = int(line.split()[1]) * 1024
            total += size
            pool += size if name.startswith("/memfd:pdserve-kv") else 0
    return total, pool


def used(address: str) -> list[WorkerRecord]:
    """The workers, after some requests."""
    with Client(address) as client:
        for number in range(REQUESTS):
            prompt = [1000 + (number * 7919 + i * 31) % 40000 for i in range(PROMPT_TOKENS)]
            client.generate(token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True).result()
        return [worker.record for worker in client.get_status().workers]


def storages(part: Any, found: dict[int, int]) -> dict[int, int]:
    """Bytes by address of all tensors in dataclasses, tuples and mappings."""
    if isinstance(part, torch.Tensor):
        found[part.data_ptr()] = part.numel() * part.element_size()
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            storages(getattr(part, field.name), found)
    elif isinstance(part, list | tuple):
        for each in part:
            storages(each, found)
    return found


def weight_bytes(form: str) -> int:
    """Of a model as a worker of this form holds it, packed for the kernels."""
    model = load_model(DEFAULT_MODEL, keep_quantised=form != "exact")
    pack = packer(form, model.quantised, deterministic=False)
    return sum(
        storages(build_decoder(model.config, model.weights, deterministic=False, pack=pack), {}).values()
    )


def memory(record: WorkerRecord, weights: dict[Role, tuple[str, int]]) -> Memory:
    """What a worker has now."""
    total, pool = pss(record.pid)
    form, size = weights[record.role]
    parts = {"total_mb": total, "pool_mb": pool, "weights_mb": size, "rest_mb": total - pool - size}
    return Memory(role=str(record.role), form=form, **{n: round(v / MB, 1) for n, v in parts.items()})


def measure(precision: str, starts: int, weights: dict[Role, tuple[str, int]], cache: str) -> dict[str, Any]:
    """The first start and the others; memory at the last."""
    times, phases, workers = [], [], []
    for number in range(starts + 1):
        with served(precision, cache) as (address, seconds, where):
            times.append(round(seconds, 1))
            phases.append(where)
            print(f"{precision} start {number + 1}: ready after {seconds:.1f} s ({where})", flush=True)
            if number == starts:
                workers = [memory(record, weights) for record in used(address)]
    for worker in workers:
        print(f"  {worker}", flush=True)
    return {
        "first_s": times[0],
        "later_s": times[1:],
        "ready_s": statistics.median(times[1:]),
        "phases": phases,
        "workers": [asdict(worker) for worker in workers],
        "rest_mb": max(worker.rest_mb for worker in workers),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", default=",".join(PRECISIONS))
    parser.add_argument("--starts", type=int, default=3, help="starts after the first")
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"precisions": {}}
    facts = {"date": machine.now().isoformat(), "machine": machine.machine(), "versions": machine.us()}
    for precision in options.precision.split(","):
        forms = {r: chosen(Wish(role=r, precision=precision), DEFAULT_MODEL).weights for r in Role}
        weights = {
            role: (form, weight_bytes(form)) for role, form in forms.items() if role != Role.AGGREGATED
        }
        with tempfile.TemporaryDirectory() as cache:
            kept["precisions"][precision] = measure(precision, options.starts, weights, cache) | facts
    RESULTS.write_text(json.dumps({**kept, "bars": BARS, "goals": GOALS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
