"""What it takes to bring experts' rows back to their tokens: by gather and by all-to-all, on 2 and 4 ranks.

    python -m benchmarks.expert_exchange [--seconds 0.3]

Rows are routed and exchanged as a layer's are (`pdserve.parallel.expert_exchange`), without the products
between. Time is over shared memory, all ranks on this machine's cores: the shortest round of the slowest
rank. "Wire" is what the kernel counted on the busiest rank's sockets when the ranks exchange over gloo;
"theory" is counted from the routing: each row once from its expert's rank to where it is summed (gather: to
all, padded), each sum once to every other rank. Written: results/expert_exchange.json and .png.

Legend: T tokens, X experts, C choices per token, E hidden size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.expert_exchange_plot import plot
from benchmarks.machine import machine, now, us
from benchmarks.wire import wire_bytes
from pdserve.parallel.expert_exchange import OwnedRows, SharedRows
from pdserve.parallel.group import Group, GroupConfig, open_group
from pdserve.parallel.shards import split
from pdserve.parallel.shm_group import ShmGroup, segment_bytes

RANKS, WAYS = (2, 4), ("gather", "all-to-all", "there and back")
EXPERTS, WIDTH, DTYPE = 32, 1024, torch.bfloat16
SIZES = ((8, 2), (64, 2), (256, 2), (1024, 2), (8, 8), (64, 8), (256, 8), (1024, 8))
"""(tokens of a step, choices)."""
SKEWS = (0.0, 1.0)
"""Exponents of Zipf: how uneven the experts' load is."""
ALWAYS, NEVER = -(1 << 60), 1 << 60
ROUNDS_OF_BYTES = 5


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes; with --rank it is one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="time of each measurement")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank >= 0:
        return one_rank(options.rank, options.ranks, options.folder, options.seconds)
    facts = {"machine": machine(), "us": us(), "date": now().isoformat(), "experts": EXPERTS, "width": WIDTH}
    lines: list[dict[str, Any]] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            for line in _launched(ranks, folder, options.seconds):
                print(json.dumps(line), flush=True)
                lines.append(line)
    plot(lines, facts)
    print("written: benchmarks/results/expert_exchange.json and .png")
    return 0


def _launched(ranks: int, folder: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The ranks as children; what the first one prints."""
    command = [sys.executable, "-m", "benchmarks.expert_exchange", "--ranks", str(ranks), "--folder", folder]
    command += ["--seconds", str(seconds), "--rank"]
    children = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
        for rank in range(ranks)
    ]
    told = children[0].stdout
    assert told is not None
    yield from (json.loads(line) for line in told)
    statuses = [child.wait() for child in children]
    if any(statuses):
        raise RuntimeError("a rank failed; its error stands above")


def one_rank(rank: int, ranks: int, folder: Path, seconds: float) -> int:
    """Takes part in all cases; rank 0 prints a line for each."""
    torch.set_num_threads(1)
    sockets = open_group(GroupConfig(rank=rank, size=ranks, meeting=folder / "meet"))
    fd = os.open(folder / "segment", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, segment_bytes(ranks))
    memory = ShmGroup(fd, rank=rank, size=ranks)
    for tokens, choices in SIZES:
        for skew in SKEWS:
            experts_TC = routing(tokens, choices, skew)
            for way in WAYS:
                line = {"ranks": ranks, "tokens": tokens, "choices": choices, "skew": skew, "way": way}
                line["us"] = round(1e6 * _seconds(round_of(way, experts_TC, memory), memory, seconds), 1)
                line["wire_bytes"] = _wire(round_of(way, experts_TC, sockets), sockets)
                line["theory_bytes"] = theory(way, experts_TC, ranks)
                if rank == 0:
                    print(json.dumps(line), flush=True)
    return 0


def routing(tokens: int, choices: int, skew: float) -> torch.Tensor:
    """experts_TC: distinct ones per token, drawn by Zipf's weights; the busy ones lie anywhere."""
    random = torch.Generator().manual_seed(1)
    order = torch.randperm(EXPERTS, generator=random)
    weight_X = (order + 1.0) ** -skew
    return torch.multinomial(weight_X.expand(tokens, EXPERTS), choices, generator=random)


def round_of(way: str, experts_TC: torch.Tensor, group: Group) -> Callable[[], object]:
    """One layer's exchange. Expert i is in slot i; rows are the tokens' own, not multiplied by anything."""
    slots = split(EXPERTS, group.size)
    tokens = len(experts_TC)
    x_TE = torch.zeros(tokens, WIDTH, dtype=DTYPE)
    if way == "there and back":
        owned, own = OwnedRows(slots=slots, group=group), split(tokens, group.size)[group.rank]
        mine_TE, mine_TC = x_TE[own.start : own.stop], experts_TC[own.start : own.stop]

        def there_and_back() -> object:
            sent = owned.dispatch(mine_TE, mine_TC)
            return owned.combine(sent.x_ME, sent)

        return there_and_back
    shared = SharedRows(slots=slots, group=group, least_saving=ALWAYS if way == "all-to-all" else NEVER)

    def back() -> object:
        sent = shared.dispatch(x_TE, experts_TC)
        done = shared.combine(sent.x_ME, sent)
        if done.tokens is None:
            return done
        return shared.join(x_TE[done.tokens.start : done.tokens.stop], tokens)

    return back


def _seconds(call: Callable[[], object], group: Group, limit: float) -> float:
    """The shortest round of the slowest rank. Rank 0 says when it is enough."""
    call()
    shortest, until = float("inf"), time.perf_counter() + limit
    while True:
        began = time.perf_counter()
        for _ in range(10):
            call()
        took = torch.tensor([(time.perf_counter() - began) / 10, float(time.perf_counter() < until)])
        told = group.gather(took)
        shortest = min(shortest, float(told[:, 0].max()))
        if told[0, 1] == 0:
            return shortest


def _wire(call: Callable[[], object], group: Group) -> int:
    """Bytes that the busiest rank sends in one round. What gathers the answer is not in it."""
    call()
    group.gather(torch.zeros(1))
    before = wire_bytes()
    for _ in range(ROUNDS_OF_BYTES):
        call()
    # Counted when acknowledged: a gather later all have been.
    group.gather(torch.zeros(1))
    sent = (wire_bytes() - before) / ROUNDS_OF_BYTES
    return round(float(group.gather(torch.tensor([sent])).max()))


def theory(way: str, experts_TC: torch.Tensor, ranks: int) -> int:
    """Bytes that the busiest rank must send, counted row by row."""
    tokens = len(experts_TC)
    home = [rank for rank, part in enumerate(split(EXPERTS, ranks)) for _ in part]
    owner = [rank for rank, part in enumerate(split(tokens, ranks)) for _ in part]
    pairs = [(home[e], owner[t]) for t, row in enumerate(experts_TC.tolist()) for e in row]
    row = WIDTH * DTYPE.itemsize
    if way == "gather":
        return (ranks - 1) * max(sum(h == r for h, _ in pairs) for r in range(ranks)) * row
    back = [sum(h == r != o for h, o in pairs) for r in range(ranks)]
    if way == "all-to-all":
        return (max(back) + (ranks - 1) * -(-tokens // ranks)) * row
    once = {(t, home[e]) for t, row in enumerate(experts_TC.tolist()) for e in row}
    there = [sum(owner[t] == r != h for t, h in once) for r in range(ranks)]
    told = (ranks - 1) * (EXPERTS + ranks) * 8
    slots = 4 * experts_TC.shape[1]
    return max(b * row + t * (row + slots) for b, t in zip(back, there, strict=True)) + told


if __name__ == "__main__":
    raise SystemExit(main())
