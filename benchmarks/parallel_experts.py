"""A mixture of experts on 1, 2 and 4 ranks that share the same threads: tokens per second, cost of exchange.

    python -m benchmarks.parallel_experts [--seconds 1.2] [--threads N]

The default model upcycled to four noisy experts per layer, two per token, in bfloat16; otherwise as
`benchmarks.parallel`, whose steps these are (8 rows in decode, 256 in prefill). Written:
results/parallel_experts.json and .png. "Theory": attention's all-reduce as a ring, and each layer's experts
by the padded gather, whose length follows from that layer's counted load; less on the wire means that some
layers took the all-to-all.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, now, us
from benchmarks.parallel import DTYPE, ITEM_BYTES, decode_plan, measure, prefill_plan, ring, runner_of
from benchmarks.parallel_plot import plot_experts
from pdserve.engine.runner import ModelRunner
from pdserve.models.loader import load_model
from pdserve.models.sharded_experts import expert_slots
from pdserve.models.upcycle import Upcycling, upcycle
from pdserve.sched.plan import StepPlan

DENSE = "smollm2-135m-instruct"
MADE = Upcycling(num_experts=4, top_k=2, noise=0.01)
CASES = ((1, ""), (2, "gloo"), (4, "gloo"), (2, "shm"), (4, "shm"))
"""(ranks, how they exchange)."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.2, help="time of each measurement")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    facts = {"machine": machine(), "us": us(), "date": now().isoformat(), "threads": options.threads}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder) / "moe")
        upcycle(load_model(DENSE, DTYPE), Path(made), MADE)
        model = load_model(made, DTYPE)
        for ranks, exchange in CASES:
            with runner_of(model, ranks, exchange, False, options.threads, made) as runner:
                for phase, plan in (("decode", decode_plan()), ("prefill", prefill_plan())):
                    line = {"phase": phase, "ranks": ranks, "exchange": exchange, "deterministic": False}
                    line |= measure(runner, plan, options.seconds)
                    if exchange == "gloo":
                        line["theory_bytes"] = theory(runner, ranks, plan)
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    plot_experts(lines, facts)
    print("written: benchmarks/results/parallel_experts.json and .png")
    return 0


def theory(runner: ModelRunner, ranks: int, plan: StepPlan) -> int:
    """Bytes that the leader sends in a step; runs one to count its load. Its logits are its own."""
    config, load = runner.config, runner.expert_load
    assert load is not None
    load.reset()
    runner.execute(plan)
    whole, last = plan.num_tokens, sum(seq.sample for seq in plan.seqs)
    row = config.hidden_size * ITEM_BYTES
    # The last layer has only the rows whose logits are wanted; sums are of float32.
    sums = ring(ranks) * (whole * row + ((config.num_layers - 1) * whole + last) * 2 * row)
    slots = expert_slots(config, ranks)
    most = (max(int(counts_X[p.start : p.stop].sum()) for p in slots) for counts_X in load.counts_LX)
    return round(sums + (ranks - 1) * sum(most) * row)


if __name__ == "__main__":
    raise SystemExit(main())
