"""The plot of benchmarks.handover: a panel per figure, a group of bars per prompt length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1f6fb2", "#e08a2b", "#7fb2dd", "#f0c48f")
PANELS = (
    ("ttft_ratio", "TTFT over aggregated", 1.05, 1.0),
    ("hidden", "share of the wire hidden behind compute", 0.9, 1.0),
    ("handover_p50_ms", "last chunk to first decode step, p50 ms", None, 1.0),
    ("peak_held_bytes", "peak held by transfers, MiB", None, 2.0**-20),
)


def plot(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], target: Path) -> None:
    """Writes a PNG. Lines of systems without a handover are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    moved = [line for line in lines if line["handover_p50_ms"] is not None]
    systems = list(dict.fromkeys(line["system"] for line in moved))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 4.2))
    for axis, (name, title, goal, unit) in zip(axes, PANELS, strict=True):
        for number, system in enumerate(systems):
            _bars(axis, [x for x in moved if x["system"] == system], name, unit, number, len(systems))
        if goal is not None:
            axis.axhline(goal, color="#888888", linewidth=1, linestyle="--")
        lengths = list(dict.fromkeys(line["length"] for line in moved))
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.set_xlabel("prompt tokens", fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    about = facts["machine"]
    figure.suptitle(f"SmolLM2-135M-Instruct, {about['cpu']}, {about['cpus']} cores, {facts['date'][:10]}")
    figure.tight_layout()
    figure.savefig(target, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def _bars(
    axis: Any, lines: Sequence[Mapping[str, Any]], name: str, unit: float, number: int, count: int
) -> None:
    width = 0.8 / count
    places = [place + (number - (count - 1) / 2) * width for place in range(len(lines))]
    heights = [line[name] * unit for line in lines]
    label = lines[0]["system"]
    axis.bar(places, heights, width * 0.92, color=COLOURS[number % len(COLOURS)], label=label)
    for place, height in zip(places, heights, strict=True):
        axis.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=7)
