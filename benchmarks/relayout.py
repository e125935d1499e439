"""What re-layout costs: copies per page and GB/s for the default model's pages, against memcpy of equal
bytes.

What lives here: the compiled executor between pools in memory, one thread; progress on stderr, a table on
stdout, JSON and a plot in benchmarks/results. What does not: how pages get here (`benchmarks.transfer`).

    python -m benchmarks.relayout [--rounds 7] [--mib 96] [--cpu-time] [--out NAME]

Every pair of TP {1,2,3} and page size {16,32} on either side, and every pair of inner orders and dtypes at
TP 1. A round copies a pool of `--mib` by memcpy, span by span; by the executor without any change of layout,
which stores past the cache as the page mover does; and then re-lays it. Ratios are medians of paired ratios.
Pools are larger than the caches, and spans are taken in a shuffled order, as pages are handed out.
--cpu-time measures the thread's processor time instead of the wall, on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine, now, us
from kvtransfer.plan import FULL, RelayoutPlan, ReplicaLayout, compile_plan
from kvtransfer.plan.order import PLAIN
from kvtransfer.plan.prove import prove
from kvtransfer.relay import NativeRelayout
from pdserve.kernels.kv_view import inner_layout

RESULTS = Path(__file__).parent / "results"
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
RANKS = {1: ((0, 3),), 2: ((0, 2), (2, 3)), 3: ((0, 1), (1, 2), (2, 3))}
SIDES = tuple(itertools.product((1, 2, 3), (16, 32)))
ALIGN = 4096
Pages = dict[tuple[int, int], int]


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def layout(dtype: str, tp: int, page_size: int, inner: str | None = None) -> ReplicaLayout:
    """The default model's pages. inner: None is the kernels' own order."""
    return ReplicaLayout(
        page_size=page_size, head_dim=HEAD_DIM, num_kv_heads=KV_HEADS, dtype=dtype,
        inner=inner or inner_layout(dtype), layers=(FULL,) * LAYERS,
        ranks=tuple((range(*heads),) for heads in RANKS[tp]),
    )  # fmt: skip


def pairs(dtypes: list[str]) -> Iterator[tuple[ReplicaLayout, ReplicaLayout]]:
    """All that is measured."""
    for dtype, one, other in itertools.product(dtypes, SIDES, SIDES):
        yield layout(dtype, *one), layout(dtype, *other)
    forms = [(dtype, inner) for dtype in dtypes for inner in (inner_layout(dtype), PLAIN)]
    for (dtype, inner), (to_dtype, to_inner) in itertools.permutations(forms, 2):
        yield layout(dtype, 1, 16, inner), layout(to_dtype, 1, 16, to_inner)


class Pool:
    """Memory of a replica's pages for so many tokens, backed and filled."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = np.random.default_rng(1).integers(0, 255, size_bytes + ALIGN, np.uint8)
        self.address = -(-self._memory.ctypes.data // ALIGN) * ALIGN

    def spans(self, of: ReplicaLayout, span_tokens: int, count: int, seed: int) -> list[Pages]:
        """Addresses of the pages of each span, in a shuffled order."""
        number = span_tokens // of.page_size
        pages = [(rank, page) for page in range(number) for rank in range(len(of.ranks))]
        starts = np.cumsum([0, *(of.page_bytes(rank) for rank, _ in pages)])
        order = np.random.default_rng(seed).permutation(count)
        return [
            {
                at: self.address + int(place * starts[-1] + start)
                for at, start in zip(pages, starts, strict=False)
            }
            for place in order
        ]


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds by a clock."""
    before = clock()
    work()
    return clock() - before


class Ways:
    """The ways to move one pool to the other that a round compares."""

    def __init__(self, plan: RelayoutPlan, pools: tuple[Pool, Pool], size_bytes: int) -> None:
        self.span_tokens = span = plan.span_tokens
        self.span_bytes = sum(plan.source.page_bytes(rank) for rank, _ in plan.source_pages(span))
        self.count = size_bytes // self.span_bytes
        self._relayed = self._all(plan, pools)
        self._same = self._all(compile_plan(plan.source, plan.source), pools)
        firsts = (
            pool.spans(plan.source, span, self.count, seed) for pool, seed in zip(pools, (5, 6), strict=True)
        )
        self._firsts = [[pages[0, 0] for pages in spans] for spans in firsts]

    def round(self, clock: Callable[[], float]) -> tuple[float, float, float]:
        """Seconds of memcpy, of the executor without a change of layout, of the re-layout."""
        return timed(self._copied, clock), timed(self._same, clock), timed(self._relayed, clock)

    def _all(self, plan: RelayoutPlan, pools: tuple[Pool, Pool]) -> Callable[[], None]:
        relay, span = NativeRelayout(plan), plan.span_tokens
        count = self.count * self.span_tokens // span
        sources = pools[0].spans(plan.source, span, count, 5)
        targets = pools[1].spans(plan.target, span, count, 6)

        def work() -> None:
            for source, target in zip(sources, targets, strict=True):
                relay.execute(source_pages=source, target_pages=target, num_tokens=span)

        return work

    def _copied(self) -> None:
        for one, other in zip(*self._firsts, strict=True):
            ctypes.memmove(other, one, self.span_bytes)


def measure(
    source: ReplicaLayout, target: ReplicaLayout, pools: tuple[Pool, Pool], args: Any
) -> dict[str, Any]:
    """One pair of layouts. GB/s are of bytes read."""
    plan = compile_plan(source, target, convert=True)
    ways = Ways(plan, pools, args.mib * 2**20)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    proof_s = timed(lambda: prove(compile_plan(source, target, convert=True)), clock)
    ways.round(clock)
    rounds = [ways.round(clock) for _ in range(args.rounds)]
    middle = [statistics.median(way) for way in zip(*rounds, strict=True)]
    rates = [round(ways.count * ways.span_bytes / seconds / 1e9, 2) for seconds in middle]
    return {
        "source": side(source),
        "target": side(target),
        "copies_per_span": len(plan.copies),
        "copies_per_source_page": round(len(plan.copies) / len(plan.source_pages(plan.span_tokens)), 2),
        "gb_per_s": rates[2],
        "same_layout_gb_per_s": rates[1],
        "memcpy_gb_per_s": rates[0],
        "of_same_layout": round(statistics.median(same / mine for _, same, mine in rounds), 2),
        "of_memcpy": round(statistics.median(base / mine for base, _, mine in rounds), 2),
        "us_per_span": round(1e6 * middle[2] / ways.count, 1),
        "plan_and_proof_ms": round(1e3 * proof_s, 1),
    }


def side(of: ReplicaLayout) -> dict[str, Any]:
    """What differs between the layouts here."""
    return {"tp": len(of.ranks), "page_size": of.page_size, "dtype": of.dtype, "inner": of.inner}


def name(told: Mapping[str, Any]) -> str:
    """A side in a word."""
    form = "f32" if told["dtype"] == "float32" else "bf16"
    form += " plain" if told["inner"] == PLAIN else ""
    return f"TP{told['tp']} S{told['page_size']} {form}"


def show(rows: list[dict[str, Any]]) -> None:
    """The table, on stdout."""
    print(
        f"{'source':<19}{'target':<19}{'copies/page':>12}{'GB/s':>7}{'of same layout':>16}{'of memcpy':>11}"
    )
    for row in rows:
        words = f"{name(row['source']):<19}{name(row['target']):<19}{row['copies_per_source_page']:>12g}"
        print(f"{words}{row['gb_per_s']:>7.2f}{row['of_same_layout']:>15.2f}x{row['of_memcpy']:>10.2f}x")


def plot(result: Mapping[str, Any], target: Path) -> None:
    """Maps of all pairs: the ratio as colour, GB/s and copies per source page in words."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    maps: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        kernel_orders = PLAIN not in (row["source"]["inner"], row["target"]["inner"])
        alike = row["source"]["dtype"] == row["target"]["dtype"] and kernel_orders
        maps.setdefault(row["source"]["dtype"] if alike else "inner orders and dtypes", []).append(row)
    figure, axes = pyplot.subplots(1, len(maps), figsize=(6.4 * len(maps), 5.8), squeeze=False)
    for axis, (title, rows) in zip(axes[0], maps.items(), strict=True):
        _map(axis, rows)
        axis.set_title(f"{title}: re-layout over memcpy, one thread", fontsize=10)
    told = result["machine"]
    where = f"{told['cpu']}, load {told['load_before']}, {result['clock']}, {result['date'][:10]}"
    figure.suptitle(f"Pages of 30 layers, 3 KV heads, head dim 64; {where}", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, dpi=100, metadata={"Software": ""})
    pyplot.close(figure)


def _map(axis: Any, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name(row[end]) for end in ("source", "target") for row in rows))
    grid = np.full((len(names), len(names)), np.nan)
    for row in rows:
        at = names.index(name(row["source"])), names.index(name(row["target"]))
        grid[at] = row["of_memcpy"]
        words = (
            f"{row['of_memcpy']:.2f}x\n{row['gb_per_s']:.1f} GB/s\n{row['copies_per_source_page']:g} copies"
        )
        axis.text(at[1], at[0], words, ha="center", va="center", fontsize=7)
    axis.imshow(grid, cmap="RdYlGn", vmin=0, vmax=2)
    axis.set_xticks(range(len(names)), [word.replace(" ", "\n", 1) for word in names], fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_xlabel("target")
    axis.set_ylabel("source")


def parsed() -> argparse.Namespace:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=96, help="of pages, on either side")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--cpu-time", action="store_true", help="processor time of the thread")
    parser.add_argument("--out", default="relayout", help="name of the files in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measures every pair, then shows and writes what was found."""
    args = parsed()
    result: dict[str, Any] = {"date": now().isoformat(), "machine": machine(), "version": us()}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # copies of one thread, not of two by turns
    pools = Pool(args.mib * 2**20), Pool(2 * args.mib * 2**20)  # bfloat16 becomes twice as large
    rows, wanted = [], list(pairs(args.dtypes))
    for number, (source, target) in enumerate(wanted, 1):
        row = measure(source, target, pools, args)
        rows.append(row)
        ends = f"{name(row['source'])} to {name(row['target'])}"
        say(f"{number}/{len(wanted)} {ends}: {row['gb_per_s']:.1f} GB/s, {row['of_memcpy']:.2f}x memcpy")
    clock = "processor time" if args.cpu_time else "wall"
    result |= {"rounds": args.rounds, "mib": args.mib, "clock": clock, "rows": rows}
    show(rows)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.out}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    plot(result, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
