"""The mixed load's results for people: a line per run, the table, the plot. No arithmetic of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

Curves = Mapping[str, Mapping[float, Mapping[str, Any]]]
LOOKS = {
    "ours": ("#1f6fb2", "ours, 1 prefill + 1 decode"),
    "ours_aggregated": ("#e08a2b", "ours, aggregated"),
    "openvino": ("#6b6b6b", "OpenVINO GenAI int8"),
    "vllm": ("#a8a8a8", "vLLM CPU bf16"),
}
PANELS = (
    ("share", "share of requests within all limits", 0.9, "linear"),
    ("itl_chat_p99_ms", "inter-token latency of chats, p99 ms", 100.0, "log"),
    ("ttft_chat_p99_ms", "time to first token of chats, p99 ms", 2000.0, "log"),
    ("output_tokens_per_s", "output tokens/s", None, "linear"),
)
MARKED = ("share", "itl_chat_p99_ms", "ttft_chat_p99_ms")
"""Panels in which a change of lead between our two layouts is marked."""


def row(name: str, rate: float, run: Mapping[str, Any]) -> str:
    """A run as a line."""
    held = "" if run["sustained"] else "  [red]not sustained[/red]"
    missed = ", ".join(f"{k} {v}" for k, v in run["missed"].items() if v)
    return (
        f"  {name:<16} {rate:>5.2f}/s: {run['output_tokens_per_s']:>5.0f} tok/s, met {run['share']:.0%}, "
        f"ITL {_n(run['itl_chat_p50_ms'])}/{_n(run['itl_chat_p99_ms'])} ms, "
        f"TTFT chat {_n(run['ttft_chat_p50_ms'])}/{_n(run['ttft_chat_p99_ms'])}, "
        f"long {_n(run['ttft_long_p50_ms'])}/{_n(run['ttft_long_p99_ms'])} ms"
        f"{' (' + missed + ')' if missed else ''}{held}"
    )


def table(curves: Curves, lines: Mapping[str, Any]) -> Table:
    """All runs, and below them what they say."""
    out = Table(title="mixed load; latencies p50 / p99 in ms", caption=_verdict(lines))
    for column in ("system", "req/s", "tok/s", "met", "ITL chat", "TTFT chat", "TTFT long", "sustained"):
        out.add_column(column, justify="left" if column == "system" else "right")
    for name, curve in curves.items():
        for rate, run in sorted(curve.items()):
            pairs = [
                f"{_n(run[f'{what}_p50_ms'])} / {_n(run[f'{what}_p99_ms'])}"
                for what in ("itl_chat", "ttft_chat", "ttft_long")
            ]
            held = "yes" if run["sustained"] else "no"
            out.add_row(
                name, f"{rate:.2f}", f"{run['output_tokens_per_s']:.0f}", f"{run['share']:.0%}", *pairs, held
            )
        out.add_section()
    return out


def _verdict(lines: Mapping[str, Any]) -> str:
    said = []
    for name in ("ours", "ours_aggregated"):
        equal, good = lines[name]["itl_at_equal_throughput"], lines[name]["goodput"]
        itl = f"{equal['ratio']:.2f}x of {equal['peer']} at {equal['rate']}/s" if equal else "no common rate"
        rate = good["rates"].get(name, 0.0)
        times = f" = {good['ratio']:.2f}x of {good['peer']}" if good["ratio"] is not None else ""
        times = f", over {good['ratio_above']:.1f}x of any peer" if good["ratio_above"] is not None else times
        said.append(f"{name}: p99 ITL {itl}; goodput up to {rate}/s{times}")
    return "\n".join([*said, f"ours and aggregated cross at {lines['crossovers']}"])


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def plot(curves: Curves, found: Mapping[str, Any], target: Path) -> None:
    """A panel per figure over the rate; limits dashed, crossovers of our layouts dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 4.2))
    for axis, (name, title, limit, scale) in zip(axes, PANELS, strict=True):
        for system, curve in curves.items():
            _curve(axis, system, curve, name)
        if limit is not None:
            axis.axhline(limit, color="#bb3333", linewidth=1, linestyle="--")
        for rate in found["lines"]["crossovers"].get(name, []) if name in MARKED else []:
            axis.axvline(rate, color="#444444", linewidth=1, linestyle=":")
            axis.annotate(f"{rate}", (rate, 1), xycoords=("data", "axes fraction"), fontsize=7, va="bottom")
        axis.set_yscale(scale)
        if scale == "log":
            axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_xlabel("requests/s (1 of 11 has 4,000 tokens)", fontsize=9)
        axis.set_title(title, fontsize=10, pad=14)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7)
    about = found["machine"]
    figure.suptitle(
        f"Mixed load, SmolLM2-135M-Instruct, {about['cpu']}, {about['cpus']} cores, {found['date'][:10]}; "
        "filled: sustained; dotted: our layouts change places",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def _curve(axis: Any, system: str, curve: Mapping[float, Mapping[str, Any]], name: str) -> None:
    colour, label = LOOKS.get(system, ("#44aa77", system))
    points = [(rate, run) for rate, run in sorted(curve.items()) if run[name] is not None]
    axis.plot([r for r, _ in points], [run[name] for _, run in points], color=colour, label=label)
    for rate, run in points:
        fill = colour if run["sustained"] else "white"
        axis.plot(rate, run[name], "o", markersize=5, markeredgecolor=colour, markerfacecolor=fill)
