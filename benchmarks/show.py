"""Results for people: the table and the plot. Takes the lines of the result file as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Lines = Sequence[Mapping[str, Any]]


def table(lines: Lines, engines: Sequence[str]) -> Table:
    """One row per case; of each peer its fastest variant on that row."""
    out = Table(
        title=f"medians of {max(line['pairs'] for line in lines)} pairs; ratios are medians of paired ratios"
    )
    out.add_column("case", no_wrap=True)
    ratios = ("ours /\nbest", "aggr. /\nbest", "ours /\naggr.")
    for column in ("ours", "aggregated", *engines, *ratios):
        out.add_column(column, justify="right")
    for line in lines:
        peers = [_peer(line, engine) for engine in engines]
        found = [line["ratio_to_best"], line["ratio_to_best_aggregated"], line["ratio_to_own_aggregated"]]
        own = [_number(line["ours"]), _number(line["ours_aggregated"])]
        title = f"{line['case']}\n[dim]{line['unit']}[/dim]"
        out.add_row(title, *own, *peers, *("-" if r is None else f"{r:.2f}x" for r in found))
    return out


def _peer(line: Mapping[str, Any], engine: str) -> str:
    variant = line["peer_variant"].get(engine)
    if variant is not None:
        return f"{_number(line['peers'][engine])}\n[dim]{variant.removeprefix(engine).strip()}[/dim]"
    return "[red]failed[/red]" if any(name.startswith(engine) for name in line["peer_errors"]) else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plot(lines: Lines, engines: Sequence[str], target: Path) -> None:
    """A panel per case: a bar per system (its median), a whisker from its lowest to its highest sample."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(lines), figsize=(4.2 * len(lines), 4.6), squeeze=False)
    for axis, line in zip(axes[0], lines, strict=True):
        _panel(axis, line, engines)
    first = lines[0]
    figure.suptitle(
        f"SmolLM2-135M-Instruct, {first['machine']['cpu']}, {first['machine']['cpus']} cores, "
        f"{first['date'][:10]}; higher is better",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def _panel(axis: Any, line: Mapping[str, Any], engines: Sequence[str]) -> None:
    bars = [("ours\n1P+1D", "ours", "#1f6fb2"), ("aggregated", "ours_aggregated", "#7fb2dd")]
    grey = ("#8c8c8c", "#a8a8a8", "#c4c4c4")
    for number, engine in enumerate(engines):
        if variant := line["peer_variant"].get(engine):
            label = f"{engine}\n{variant.removeprefix(engine).strip()}".replace(" as ", "\nas ")
            bars.append((label.replace(" all", "\nall"), variant, grey[number % len(grey)]))
    bars = [bar for bar in bars if line["samples"].get(bar[1])]
    middles = [line["ours"], line["ours_aggregated"], *line["peers"].values()]
    heights = [value for value in middles if value is not None]
    for place, ((_, key, colour), height) in enumerate(zip(bars, heights, strict=True)):
        low, high = min(line["samples"][key]), max(line["samples"][key])
        error = [[max(0.0, height - low)], [max(0.0, high - height)]]
        axis.bar(place, height, color=colour, yerr=error, capsize=3, ecolor="#444444")
        axis.text(place, high, f"{height:,.0f}", ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(bars)), [label for label, _, _ in bars], fontsize=7)
    axis.set_title(line["case"].replace("_", " "), fontsize=10)
    axis.set_ylabel(line["unit"], fontsize=9)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)
