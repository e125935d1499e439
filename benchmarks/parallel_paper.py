"""Tensor parallelism on up to 64 GPUs, on paper: how long a step takes by plan, and which plan wins when.

    python -m benchmarks.parallel_paper PROFILE

PROFILE: the folder of one GPU's profile by aiconfigurator (node.yaml, custom_allreduce.csv.gz). Prints the
tables of docs/parallelism.md. No measurement of ours: bandwidths are the profile's, all-reduces within a node
of eight its measured ones.

A fleet of G GPUs is G / n replicas of n ranks, n up to G. In a decode step a rank reads its part of the
weights and of its sequences' KV, and takes part in two all-reduces a layer; a prompt is multiplied instead.
Beyond a node an all-reduce is one within it and, for each rank's part, a ring between nodes. Ranks beyond the
KV heads hold copies of them.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import gzip
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NODE_GPUS = 8
RANKS = (1, 2, 4, 8, 16, 32, 64)
COMPUTE_SHARE = 0.6
"""Of the peak rate that large products reach; a round figure."""
CONTEXT = 4096
ITEM_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes in elements; num_params counts all weights."""

    name: str
    num_params: float
    num_layers: int
    hidden: int
    num_kv_heads: int
    head_dim: int

    def kv_bytes(self, tokens: int) -> float:
        """Keys and values of so many tokens."""
        return 2.0 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES * tokens


MODELS = (
    Model(name="8B", num_params=8.0e9, num_layers=32, hidden=4096, num_kv_heads=8, head_dim=128),
    Model(name="70B", num_params=70.6e9, num_layers=80, hidden=8192, num_kv_heads=8, head_dim=128),
)
"""Llama 3's sizes (arXiv 2407.21783, table 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Rates per GPU, bytes and operations per second. all_reduce: (elements, seconds) by GPUs, ascending."""

    memory: float
    capacity: float
    flops: float
    between_nodes: float
    hop_s: float
    all_reduce: dict[int, list[tuple[int, float]]]

    @classmethod
    def read(cls, folder: Path) -> Gpu:
        """From a profile's folder."""
        text = (folder / "node.yaml").read_text()

        def number(name: str) -> float:
            found = re.search(rf"^\s*{name}:\s*([\d.e+-]+)", text, re.MULTILINE)
            assert found is not None, f"node.yaml has no {name}"
            return float(found[1])

        table: dict[int, list[tuple[int, float]]] = {}
        with gzip.open(folder / "custom_allreduce.csv.gz", "rt") as file:
            for row in csv.DictReader(file):
                if row["backend"] == "vllm_graph" and row["dtype"] == "bfloat16":
                    point = int(row["message_elements"]), float(row["latency_ms"]) / 1000
                    table.setdefault(int(row["num_gpus"]), []).append(point)
        return cls(
            memory=number("mem_bw") * number("mem_bw_empirical_scaling_factor"),
            capacity=number("mem_capacity"),
            flops=number("bfloat16_tc_flops") * COMPUTE_SHARE,
            between_nodes=number("inter_node_bw"),
            hop_s=number("p2p_latency"),
            all_reduce={gpus: sorted(points) for gpus, points in table.items()},
        )

    def reduce_s(self, ranks: int, elements: float) -> float:
        """One all-reduce of so many bfloat16 elements."""
        if ranks == 1:
            return 0.0
        inside = _between(self.all_reduce[min(ranks, NODE_GPUS)], elements)
        nodes = ranks // NODE_GPUS
        if nodes <= 1:
            return inside
        ring = 2 * (nodes - 1)
        return (
            inside + ring * self.hop_s + ring / nodes * elements * ITEM_BYTES / NODE_GPUS / self.between_nodes
        )


def _between(points: list[tuple[int, float]], at: float) -> float:
    """Along the measured points; beyond the last one in proportion."""
    sizes = [size for size, _ in points]
    after = bisect.bisect_left(sizes, at)
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1] * at / sizes[-1]
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (math.log(at / left) / math.log(right / left))


def decode_s(gpu: Gpu, model: Model, ranks: int, per_gpu: float) -> tuple[float, float]:
    """(seconds of a step of one replica, of them in exchange)."""
    exchange = 2 * model.num_layers * gpu.reduce_s(ranks, per_gpu * ranks * model.hidden)
    return _held(model, ranks, per_gpu) / gpu.memory + exchange, exchange


def prefill_s(gpu: Gpu, model: Model, ranks: int, tokens: int) -> tuple[float, float]:
    """(seconds of one prompt alone on a replica, of them in exchange); attention's share is left out."""
    exchange = 2 * model.num_layers * gpu.reduce_s(ranks, tokens * model.hidden)
    return 2 * model.num_params * tokens / ranks / gpu.flops + exchange, exchange


def plans(gpu: Gpu, model: Model, per_gpu: float) -> list[int]:
    """Ranks per replica with which weights and the KV of `per_gpu` sequences a GPU fit its memory."""
    return [n for n in RANKS if _held(model, n, per_gpu) <= 0.9 * gpu.capacity]


def _held(model: Model, ranks: int, per_gpu: float) -> float:
    """Bytes of a rank: its weights, and the KV heads it has of all the replica's sequences."""
    kv = per_gpu * ranks * model.kv_bytes(CONTEXT) / min(ranks, model.num_kv_heads)
    return model.num_params * ITEM_BYTES / ranks + kv


def decode_rows(gpu: Gpu, model: Model) -> Iterator[str]:
    """For every load the step of each plan; the shortest one in bold."""
    for per_gpu in (1, 8, 64):
        steps = {n: decode_s(gpu, model, n, per_gpu) for n in plans(gpu, model, per_gpu)}
        if steps:
            yield f"| {per_gpu} | {_cells(steps)} |"


def prefill_rows(gpu: Gpu, model: Model) -> Iterator[str]:
    """For prompts of some lengths, the time of each plan."""
    for tokens in (512, 8192):
        steps = {n: prefill_s(gpu, model, n, tokens) for n in plans(gpu, model, 0)}
        yield f"| {tokens:,} | {_cells(steps)} |"


def _cells(steps: dict[int, tuple[float, float]]) -> str:
    best, cells = min(steps, key=lambda n: steps[n][0]), []
    for n in RANKS:
        if n not in steps:
            cells.append("")
            continue
        whole, exchange = steps[n]
        text = f"{_ms(whole)} ({100 * exchange / whole:.0f} %)"
        cells.append(f"**{text}**" if n == best else text)
    return " | ".join(cells)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


def main(argv: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    gpu = Gpu.read(parser.parse_args(argv).profile)
    ranks = " | ".join(f"TP {n}" for n in RANKS)
    for model in MODELS:
        print(f"\n{model.name}, decode step in ms (share of exchange), {CONTEXT:,} tokens of context:\n")
        print(f"| sequences per GPU | {ranks} |\n|{'---|' * 8}")
        print("\n".join(decode_rows(gpu, model)))
        print(f"\n{model.name}, one prompt in ms (share of exchange):\n")
        print(f"| tokens | {ranks} |\n|{'---|' * 8}")
        print("\n".join(prefill_rows(gpu, model)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
