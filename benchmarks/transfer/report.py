"""What a transfer run found, for people and for files: the table, the JSON, the plot. No measuring here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.transfer.ways import Way

RESULTS = Path(__file__).resolve().parents[1] / "results"
TARGETS = {
    "shm, no digest": ("memcpy", 0.8),
    "tcp, no digest": ("bare socket", 0.9),
    "tcp": ("bare socket", 0.8),
}


def rows(
    ways: Sequence[Way], seconds: Mapping[str, list[float]], cpu: Mapping[str, float], size_bytes: int
) -> list[dict[str, Any]]:
    """One row for each way; ratios are medians of paired ratios, round by round."""
    found = []
    for way in ways:
        mine = seconds[way.name]
        ratios = {
            base: statistics.median(b / a for a, b in zip(mine, seconds[base], strict=True))
            for base in way.bases
        }
        base, wanted = TARGETS.get(way.name, ("", 0.0))
        found.append(
            {
                "way": way.name,
                "gb_per_s": round(size_bytes / statistics.median(mine) / 1e9, 2),
                "best_gb_per_s": round(size_bytes / min(mine) / 1e9, 2),
                "ratios": {base: round(ratio, 2) for base, ratio in ratios.items()},
                "target": {base: wanted} if base else {},
                "met": ratios[base] >= wanted if base else None,
                "cpu_s_per_gb": round(cpu[way.name] / (len(mine) * size_bytes / 1e9), 3),
                "bytes_per_descriptor": way.descriptor_bytes,
            }
        )
    return found


def show(result: Mapping[str, Any]) -> None:
    """The table, on stdout."""
    print(f"{'way':<18}{'GB/s':>7}{'best':>7}{'CPU s/GB':>10}{'bytes/descr.':>14}   medians of paired ratios")
    for row in result["rows"]:
        ratios = "  ".join(f"{ratio:.2f}x {base}" for base, ratio in row["ratios"].items())
        for base, wanted in row["target"].items():
            ratios += f"   target {wanted}x {base}: {'met' if row['met'] else 'MISSED'}"
        figures = f"{row['gb_per_s']:>7.2f}{row['best_gb_per_s']:>7.2f}{row['cpu_s_per_gb']:>10.3f}"
        print(f"{row['way']:<18}{figures}{row['bytes_per_descriptor']:>14,}   {ratios}")
    for name, rate in result["digest_gb_per_s"].items():
        print(f"{name:<25}{rate:>6.1f} GB/s, one thread")
    for name, steps in result["latency_us"].items():
        print(
            f"one page by {name}, µs after read: "
            + "  ".join(f"{step} {at:.0f}" for step, at in steps.items())
        )


def write(result: Mapping[str, Any], target: Path | None) -> None:
    """JSON and plot: beside the other results, or at `target` and its .png."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "transfer.json" if target is None else target
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    plot(result, path.with_suffix(".png"))


def plot(result: Mapping[str, Any], target: Path) -> None:
    """A bar for each way (its median), a whisker to its best round, and the steps of one page's latency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, steps) = pyplot.subplots(1, 2, figsize=(13, 4.8), width_ratios=(3, 2))
    for place, row in enumerate(result["rows"]):
        plain = row["way"] in ("memcpy", "memcpy + digest", "bare socket", "NIXL itself")
        best = [[0.0], [max(0.0, row["best_gb_per_s"] - row["gb_per_s"])]]
        rates.bar(place, row["gb_per_s"], color="#a8a8a8" if plain else "#1f6fb2", yerr=best, capsize=3)
        ratios = "\n".join(f"{ratio:.2f}x {base}" for base, ratio in row["ratios"].items())
        rates.text(place, row["best_gb_per_s"], ratios, ha="center", va="bottom", fontsize=6)
    names = [row["way"].replace(", ", ",\n").replace(" + ", "\n+ ") for row in result["rows"]]
    rates.set_xticks(range(len(names)), names, fontsize=7)
    rates.set_ylabel("GB/s, median; whisker: best round")
    rates.margins(y=0.15)
    for name, found in result["latency_us"].items():
        known = [(step, at) for step, at in found.items() if " p" not in step[-4:]]
        steps.plot([at for _, at in known], range(len(known)), marker="o", label=name)
        for place, (step, at) in enumerate(known):
            steps.annotate(f" {step} {at:.0f}", (at, place), fontsize=7)
    steps.set_xlabel("µs after read, one page, medians")
    steps.set_yticks([])
    steps.margins(x=0.3)
    steps.legend(fontsize=8)
    for axis in (rates, steps):
        axis.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]
    figure.suptitle(
        f"{result['pages']} pages of {result['page_bytes']:,} bytes between two processes, {machine['cpu']}, "
        f"{machine['cpus']} cores, load {machine['load_before']}, {result['date'][:10]}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)
