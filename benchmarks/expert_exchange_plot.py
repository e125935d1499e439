"""Writes what benchmarks.expert_exchange measured: JSON, and a plot of time and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = {"gather": "#888888", "all-to-all": "#1f6fb2", "there and back": "#e08a2b"}


def plot(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """results/expert_exchange.json and .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**facts, "lines": lines}, indent=1, ensure_ascii=False)
    (RESULTS / "expert_exchange.json").write_text(text + "\n")
    ranks = sorted({line["ranks"] for line in lines})
    figure, axes = pyplot.subplots(2, len(ranks), figsize=(7.5 * len(ranks), 8), squeeze=False)
    for column, count in enumerate(ranks):
        of_count = [line for line in lines if line["ranks"] == count]
        _lines(axes[0][column], of_count, f"time of one layer's exchange, {count} ranks, shared memory", "us")
        _lines(axes[1][column], of_count, f"bytes of the busiest rank, {count} ranks", "wire_bytes")
    axes[0][0].legend(fontsize=8)
    about = facts["machine"]
    figure.suptitle(
        f"{facts['experts']} experts, rows of {facts['width']} bfloat16, {about['cpu']}, "
        f"{about['cpus']} cores, {facts['date'][:10]}; crosses: theory"
    )
    figure.tight_layout()
    figure.savefig(RESULTS / "expert_exchange.png", dpi=100, metadata={"Software": ""})
    pyplot.close(figure)


def _lines(axis: Any, lines: Sequence[Mapping[str, Any]], title: str, name: str) -> None:
    for way, colour in COLOURS.items():
        ours = [line for line in lines if line["way"] == way]
        places = range(len(ours))
        axis.plot(places, [line[name] for line in ours], "o-", color=colour, label=way, markersize=4)
        if name == "wire_bytes":
            axis.plot(places, [line["theory_bytes"] for line in ours], "x", color="black", markersize=5)
        axis.set_xticks(
            list(places),
            [f"T {x['tokens']}\nC {x['choices']}\nz {x['skew']:g}" for x in ours],
            fontsize=6,
        )
    axis.set_yscale("log")
    axis.set_ylabel("µs" if name == "us" else "bytes")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
