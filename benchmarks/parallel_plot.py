"""Writes what benchmarks.parallel measured: JSON, and a plot with a panel per figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = {
    ("", False): "#888888",
    ("gloo", False): "#7fb2dd",
    ("shm", False): "#1f6fb2",
    ("shm", True): "#e08a2b",
}
"""By how ranks exchange, and whether they are deterministic."""
NAMES = {
    ("", False): "one rank",
    ("gloo", False): "added, over loopback sockets",
    ("shm", False): "added, over shared memory",
    ("shm", True): "gathered (deterministic), over shared memory",
}


def plot(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """results/parallel.json and .png."""
    _write(lines, facts, "parallel", "SmolLM2-135M bfloat16 on ranks")


def _write(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], name: str, what: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**facts, "lines": lines}, indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4.2))
    _bars(axes[0], [x for x in lines if x["phase"] == "decode"], "tokens_per_s", "decode, tokens/s")
    _bars(axes[1], [x for x in lines if x["phase"] == "prefill"], "tokens_per_s", "prefill, tokens/s")
    several = [x for x in lines if x["ranks"] > 1]
    _bars(axes[2], several, "exchange_share", "share of a step spent in exchange")
    wired = [x for x in several if x["exchange"] == "gloo"]
    ratio = [{**x, "ratio": x["wire_bytes"] / x["theory_bytes"]} for x in wired]
    _bars(axes[3], ratio, "ratio", "bytes sent by the leader over a ring's")
    axes[0].legend(handles=_legend(), fontsize=7)
    about = facts["machine"]
    figure.suptitle(f"{what} that share {facts['threads']} threads, {about['cpu']}, {facts['date'][:10]}")
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def plot_experts(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """results/parallel_experts.json and .png."""
    _write(lines, facts, "parallel_experts", "a mixture of four experts on ranks")


def _bars(axis: Any, lines: Sequence[Mapping[str, Any]], name: str, title: str) -> None:
    for place, line in enumerate(lines):
        axis.bar(place, line[name], 0.8, color=COLOURS[line["exchange"], line["deterministic"]])
        axis.text(place, line[name], f"{line[name]:.4g}", ha="center", va="bottom", fontsize=7)
    mixed = len({line["phase"] for line in lines}) > 1
    labels = [f"{x['ranks']} ranks" + (f"\n{x['phase'][:3]}." if mixed else "") for x in lines]
    axis.set_xticks(range(len(lines)), labels, fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=COLOURS[mode], label=name) for mode, name in NAMES.items()]
