"""How evenly experts load their ranks: the planner against placements that ignore load, over skew and sizes.

    python -m benchmarks.placement        # results/placement.json and .png

Loads follow a Zipf law with hot experts anywhere (a seeded shuffle): no model, no ranks, only arithmetic.
Each point is the largest rank load over the lower bound (pdserve/parallel/placement_bound.py), which holds
for any placement with those slots. Beside the planner: experts in order (contiguous) and in turn (round
robin), one copy each, and the planner with shares that are equal over replicas. The JSON also has what a
change of loads costs in copies.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, now, us
from pdserve.parallel.placement import GOOD, Policy, plan
from pdserve.parallel.placement_table import Topology, contiguous, round_robin

RESULTS = Path(__file__).parent / "results"
SKEWS = (0.6, 0.8, 1.0, 1.2, 1.4)
EXPERTS = (8, 16, 32, 64, 128, 256)
RANKS = (2, 4, 8, 16, 32)
MORE_SLOTS = (0, 1, 2)
"""Slots on each rank beyond those that one copy of each expert needs."""
SEEDS = 3
LAYERS, BIG = 60, (256, 32)
"""Layers, experts and ranks of the plans that are timed."""
CHANGED, CHANGED_SKEWS = 12, (0.6, 1.0, 1.4)
"""So many of those layers are planned again after their loads have changed, at these skews."""


def zipf(num_experts: int, skew: float, seed: int) -> list[float]:
    """Tokens by expert: the k-th hottest gets 1/k^skew of the hottest's, in shuffled order."""
    loads = [1e6 / (rank + 1) ** skew for rank in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


def sizes() -> Iterator[tuple[int, int, int]]:
    """(experts, ranks, slots of a rank); a rank never has more slots than there are experts."""
    for num_experts in EXPERTS:
        for num_ranks in RANKS:
            for more in MORE_SLOTS:
                slots = -(-num_experts // num_ranks) + more
                if slots <= num_experts:
                    yield num_experts, num_ranks, slots


def point(num_experts: int, num_ranks: int, slots: int, skew: float) -> dict[str, Any]:
    """Means over the seeds of the largest load over the bound."""
    topology = Topology(num_nodes=max(1, num_ranks // 8), ranks_per_node=min(8, num_ranks))
    layers = [zipf(num_experts, skew, seed) for seed in range(SEEDS)]
    ours = plan(layers, topology, slots)
    even = plan(layers, topology, slots, policy=Policy(even_shares=True))
    fixed = {
        "contiguous": contiguous(SEEDS, num_experts, topology, slots),
        "round_robin": round_robin(SEEDS, num_experts, topology, slots),
    }
    bounds = [layer.bound.value for layer in ours.layers]
    ratios = {
        name: statistics.fmean(table.largest(n, loads) / bounds[n] for n, loads in enumerate(layers))
        for name, table in fixed.items()
    }
    return {
        "experts": num_experts, "ranks": num_ranks, "slots": slots, "skew": skew,
        "planner": statistics.fmean(layer.ratio for layer in ours.layers),
        "worst": ours.worst.ratio, "reason": ours.worst.reason,
        "even_shares": statistics.fmean(layer.ratio for layer in even.layers), **ratios,
    }  # fmt: skip


def replans() -> list[dict[str, Any]]:
    """At the big size: seconds to plan, and copies a layer after noise, after one new hot expert, after all
    changed.
    """
    topology, (num_experts, num_ranks) = Topology(num_nodes=4, ranks_per_node=8), BIG
    rows = []
    for skew in CHANGED_SKEWS:
        loads = [zipf(num_experts, skew, seed) for seed in range(LAYERS)]
        slots = num_experts // num_ranks + 1
        began = time.perf_counter()
        first = plan(loads, topology, slots)
        row: dict[str, Any] = {"skew": skew, "slots": slots, "plan_s": time.perf_counter() - began}
        row["ratio"], row["worst"] = first.ratio, first.worst.ratio
        few = plan(loads[:CHANGED], topology, slots).table
        for name, changed in changes(loads[:CHANGED]).items():
            began = time.perf_counter()
            again = plan(changed, topology, slots, current=few)
            bound = sum(layer.bound.value for layer in again.layers)
            before = sum(few.largest(n, layer) for n, layer in enumerate(changed))
            row[name] = {
                "before": before / bound, "after": again.ratio, "worst": again.worst.ratio,
                "copies_per_layer": len(again.copies) / CHANGED,
                "seconds_per_layer": (time.perf_counter() - began) / CHANGED,
            }  # fmt: skip
        rows.append(row)
        print(f"replan at skew {skew}: {row['plan_s']:.2f} s", flush=True)
    return rows


def changes(loads: list[list[float]]) -> dict[str, list[list[float]]]:
    """Every load times a log-normal factor (sigma 0.3); hottest and 41st exchanged; all shuffled."""
    rng = random.Random(1)
    swapped = []
    for layer in loads:
        order = sorted(range(len(layer)), key=lambda e: -layer[e])
        other = list(layer)
        other[order[0]], other[order[40]] = layer[order[40]], layer[order[0]]
        swapped.append(other)
    return {
        "noise": [[load * rng.lognormvariate(0, 0.3) for load in layer] for layer in loads],
        "one_new_hot": swapped,
        "all_new": [rng.sample(layer, len(layer)) for layer in loads],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel a number of experts, ranks along the bottom; medians as lines, ranges as bands."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 7), sharey=True)
    names = {"contiguous": "contiguous", "round_robin": "round robin", "planner": "planner"}
    for axis, num_experts in zip(axes.flat, EXPERTS, strict=True):
        for (key, name), colour in zip(names.items(), ("tab:red", "tab:orange", "tab:blue"), strict=True):
            by_rank = [
                [p[key] for p in result["points"] if (p["experts"], p["ranks"]) == (num_experts, ranks)]
                for ranks in RANKS
            ]
            axis.fill_between(
                RANKS, list(map(min, by_rank)), list(map(max, by_rank)), color=colour, alpha=0.2
            )
            axis.plot(RANKS, list(map(statistics.median, by_rank)), "o-", color=colour, label=name)
        axis.axhline(GOOD, color="k", linestyle=":", linewidth=1, label=f"{GOOD}x")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_title(f"{num_experts} experts")
        axis.set_xlabel("ranks")
    axes[0][0].set_ylabel("largest rank load over the bound")
    axes[1][0].set_ylabel("largest rank load over the bound")
    axes[0][0].legend()
    figure.suptitle(
        f"Largest rank load over the lower bound: Zipf {SKEWS[0]} to {SKEWS[-1]}, 0 to 2 more slots a rank "
        f"(median and range), {result['date'][:10]}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def summary(points: list[dict[str, Any]]) -> None:
    """On stdout."""
    print(f"{len(points)} points; largest rank load over the bound: median, mean, worst")
    for name in ("planner", "even_shares", "round_robin", "contiguous"):
        values = [p[name] for p in points]
        print(
            f"{name:<12} {statistics.median(values):6.3f} {statistics.fmean(values):6.3f} {max(values):7.3f}"
        )
    over = [p for p in points if p["worst"] > GOOD]
    print(f"over {GOOD}x with the planner: {len(over)} of {len(points)} points")
    for p in over:
        size = f"{p['experts']} experts, {p['ranks']} ranks, {p['slots']} slots"
        print(f"  {size}, skew {p['skew']}: {p['reason']}")


def main() -> None:
    """Runs everything; prints, writes JSON and plot."""
    began, points = time.perf_counter(), []
    for num_experts, num_ranks, slots in sizes():
        points += [point(num_experts, num_ranks, slots, skew) for skew in SKEWS]
        if num_ranks == RANKS[-1] and len(points) % 25 == 0:
            print(f"{num_experts} experts: {len(points)} points done", flush=True)
    result: dict[str, Any] = {
        "date": now().isoformat(), "system": us(), "machine": machine(),
        "command": "python -m benchmarks.placement", "seeds": SEEDS, "points": points, "replans": replans(),
    }  # fmt: skip
    result["seconds"] = round(time.perf_counter() - began, 1)
    summary(points)
    (RESULTS / "placement.json").write_text(json.dumps(rounded(result), indent=None) + "\n")
    plot(result, RESULTS / "placement.png")


def rounded(value: Any) -> Any:
    """Floats with four digits after the point, as far as they are nested."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
