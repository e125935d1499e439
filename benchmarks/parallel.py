"""One worker on 1, 2 and 3 ranks that share the same threads: tokens per second, and what the exchange costs.

    python -m benchmarks.parallel [--seconds 1.2] [--threads N]

The default model in bfloat16, on real ranks: this process is the leader, the others are its children. One
decode step has 8 rows, one prefill step 256. Written: results/parallel.json and .png. Ranks exchange over
loopback sockets (gloo) or shared memory. "Wire" is what the kernel counted on the leader's sockets
(TCP_INFO); "theory" is what a ring moves: 2 (n - 1) / n of an all-reduced tensor, and n - 1 parts of a
gathered one. Ranks of one machine share its memory's bandwidth: what
is gained here is not what separate GPUs gain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.machine import machine, now, us
from benchmarks.parallel_plot import plot
from benchmarks.wire import wire_bytes
from pdserve.config.worker import WorkerConfig
from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kvcache.pool import KVPool
from pdserve.models.config import ModelConfig
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.parallel.group import Traffic
from pdserve.parallel.shards import shards, split
from pdserve.ranks.children import launch_child
from pdserve.ranks.replica import Replica
from pdserve.ranks.runner import ParallelRunner
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import Role, SamplingParams

MODEL, DTYPE, ITEM_BYTES = "smollm2-135m-instruct", "bfloat16", 2
PAGE, CONTEXT, ROWS, CHUNK = 16, 128, 8, 256
NUM_PAGES = 256
CASES = (
    (1, "", False),
    (2, "gloo", False), (3, "gloo", False),
    (2, "shm", False), (3, "shm", False),
    (2, "shm", True), (3, "shm", True),
)  # fmt: skip
"""(ranks, how they exchange, deterministic)."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.2, help="time of each measurement")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    facts = {"machine": machine(), "us": us(), "date": now().isoformat(), "threads": options.threads}
    model = load_model(MODEL, DTYPE)
    lines: list[dict[str, Any]] = []
    for ranks, exchange, deterministic in CASES:
        with runner_of(model, ranks, exchange, deterministic, options.threads) as runner:
            for phase, plan in (("decode", decode_plan()), ("prefill", prefill_plan())):
                line = {"phase": phase, "ranks": ranks, "exchange": exchange, "deterministic": deterministic}
                line |= measure(runner, plan, options.seconds)
                if exchange == "gloo":
                    line["theory_bytes"] = theory(model.config, ranks, plan, deterministic)
                lines.append(line)
                print(json.dumps(line), flush=True)
    plot(lines, facts)
    print("written: benchmarks/results/parallel.json and .png")
    return 0


@contextmanager
def runner_of(
    model: LoadedModel, ranks: int, exchange: str, deterministic: bool, threads: int, name: str = MODEL
) -> Iterator[ModelRunner]:
    """A runner over so many ranks, warm. name: of the model, for the ranks that load it themselves."""
    config = WorkerConfig(
        worker_id="bench", role=Role.AGGREGATED, model=name, dtype=DTYPE, deterministic=deterministic,
        page_size=PAGE, num_pages=NUM_PAGES, tp=ranks, threads=threads,
        rank_exchange=exchange or "shm",
    )  # fmt: skip
    if ranks == 1:
        layout = page_layout(model.config, page_size=PAGE, dtype=DTYPE)
        pool = KVPool.create(layout, NUM_PAGES, 1)
        yield ModelRunner(model, pool, deterministic=deterministic, threads=threads)
        pool.close()
        return
    with tempfile.TemporaryDirectory() as folder:
        replica = Replica.launch(config, folder, launch_child, print)
        try:
            runner, pool = replica.start(model, 1)
            replica.serve()
            yield runner
        finally:
            replica.close()
        pool.close()


def measure(runner: ModelRunner, plan: StepPlan, seconds: float) -> dict[str, Any]:
    """Runs the same step for so long; the shortest step counts, for others use the machine
    too. Bytes are the leader's, per step."""
    for _ in range(2):
        runner.execute(plan)
    traffic = runner.traffic if isinstance(runner, ParallelRunner) else Traffic()
    took: list[tuple[float, float]] = []
    sent, until = wire_bytes(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        exchanged = traffic.seconds
        took.append((runner.execute(plan).elapsed_s, traffic.seconds - exchanged))
    step_s, exchange_s = min(took)
    return {
        "tokens_per_s": round(plan.num_tokens / step_s, 1),
        "step_ms": round(1000 * step_s, 2),
        "median_step_ms": round(1000 * statistics.median(step for step, _ in took), 2),
        "exchange_share": round(exchange_s / step_s, 3),
        "wire_bytes": round((wire_bytes() - sent) / len(took)),
    }


def theory(config: ModelConfig, ranks: int, plan: StepPlan, deterministic: bool) -> int:
    """Bytes that the leader sends in a step if collectives are rings. Its logits are its own."""
    sampled = sum(seq.sample for seq in plan.seqs)
    whole, last = plan.num_tokens, min(sampled, plan.num_tokens)
    layers = _gathered if deterministic else _reduced
    per_row = layers(config, ranks)
    embedding = ring(ranks) * config.hidden_size * ITEM_BYTES * whole
    return round(embedding + per_row * ((config.num_layers - 1) * whole + last))


def ring(ranks: int) -> float:
    """How much of a tensor a rank sends when all ranks add it."""
    return 2 * (ranks - 1) / ranks


def _reduced(config: ModelConfig, ranks: int) -> float:
    """Two sums of a row in float32."""
    return 2 * ring(ranks) * config.hidden_size * 4


def _gathered(config: ModelConfig, ranks: int) -> float:
    """Heads, hidden, MLP, hidden: each part as wide as the widest rank's."""
    plan = shards(config, ranks)
    heads = max(len(s.heads) for s in plan) * config.head_dim
    mlp = max(len(s.mlp) for s in plan)
    hidden = max(len(part) for part in split(config.hidden_size, ranks))
    return (ranks - 1) * (heads + mlp + 2 * hidden) * ITEM_BYTES


def decode_plan() -> StepPlan:
    """Eight sequences, one row each, of a cache that is there already (its values do not matter)."""
    pages = CONTEXT // PAGE
    return StepPlan(
        step_id=1,
        seqs=tuple(
            _step(f"s{i}", (100 + i,), CONTEXT - 1, range(i * pages, (i + 1) * pages)) for i in range(ROWS)
        ),
    )


def prefill_plan() -> StepPlan:
    """One prompt's chunk from its beginning."""
    return StepPlan(step_id=1, seqs=(_step("p", tuple(range(CHUNK)), 0, range(CHUNK // PAGE)),))


def _step(name: str, tokens: tuple[int, ...], start: int, pages: range) -> SeqStep:
    return SeqStep(
        seq_id=name, token_ids=tokens, start=start, pages=tuple(pages), sample=True, sample_counter=0,
        sampling=SamplingParams(),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
