"""The plots of benchmarks.growth, drawn from result documents of `pdserve bench engine` by form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

Forms = Mapping[str, Mapping[str, Any]]
COLOURS = ("#888888", "#1f6fb2", "#e08a2b", "#3a9a5b", "#a04fb0")
PARTS = {
    "products": (("qkv", "out", "gate_up", "down"), "#1f6fb2"),
    "head": (("head",), "#7fb2dd"),
    "attention": (("attention",), "#e08a2b"),
    "norms, gates, quantising": (("rows",), "#3a9a5b"),
    "positions, page writes": (("write",), "#a9d3b4"),
    "rest": (("other",), "#888888"),
}
"""Of a breakdown: phases that are drawn as one, and their colour."""
SHOWN = ("prefill-1024", "prefill-7900", "decode-1x512", "decode-32x512")


def prefill(forms: Forms, target: Path) -> None:
    """Time of a prompt by its length, beside the floor; and the share of it."""
    figure, (times, shares) = _figure(forms, 2, "prefill in chunks of 512 tokens")
    for colour, (form, document) in zip(COLOURS, forms.items(), strict=False):
        rows = [row for row in document["cases"] if row["phase"] == "prefill"]
        _lines(times, shares, rows, form, colour)
    for axis in (times, shares):
        axis.set_xlabel("tokens of the prompt")
    _legend_below(figure, times)
    _save(figure, target)


def decode(forms: Forms, target: Path) -> None:
    """Time of a step by context, a panel for each batch, beside the floor; below, the share of it."""
    batches = sorted({r["batch"] for d in forms.values() for r in d["cases"] if r["phase"] == "decode"})
    figure, axes = _figure(forms, len(batches), "decode step", rows=2)
    for place, batch in enumerate(batches):
        times, shares = axes[place], axes[len(batches) + place]
        for colour, (form, document) in zip(COLOURS, forms.items(), strict=False):
            rows = [r for r in document["cases"] if r["phase"] == "decode" and r["batch"] == batch]
            _lines(times, shares, rows, form, colour)
        times.set_title(f"{batch} sequence{'s' if batch > 1 else ''}", fontsize=10)
        shares.set_xlabel("context, tokens")
    _legend_below(figure, axes[0])
    _save(figure, target)


def _legend_below(figure: Figure, axis: Any) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="lower center", ncols=len(names))


def _lines(times: Any, shares: Any, rows: Sequence[Mapping[str, Any]], form: str, colour: str) -> None:
    context = [row["context"] for row in rows]
    times.plot(context, [row["best_ms"] for row in rows], "o-", color=colour, ms=3.5, label=form)
    times.plot(context, [row["floor_ms"] for row in rows], "--", color=colour, lw=1, label=f"{form}, floor")
    times.set_yscale("log")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    times.yaxis.set_minor_formatter(NullFormatter())
    times.set_ylabel("ms (best run)")
    shares.plot(context, [100 * row["share"] for row in rows], "o-", color=colour, ms=3.5, label=form)
    shares.set_ylabel("floor / measured, %")
    shares.set_ylim(0, 105)
    for axis in (times, shares):
        axis.set_xscale("log", base=2)
        axis.set_xticks(context, [f"{tokens:,}" for tokens in context], fontsize=7)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)


def breakdown(forms: Forms, target: Path) -> None:
    """A panel for each step: for each form a bar of what it took, and one of its floor."""
    figure, axes = _figure(forms, len(SHOWN), "where a step's time goes; right of each bar its floor")
    for axis, name in zip(axes, SHOWN, strict=True):
        for place, document in enumerate(forms.values()):
            for row in document["cases"]:
                if row["name"] == name:
                    _stack(axis, place - 0.2, row["by_phase_ms"], 1.0)
                    _stack(axis, place + 0.2, row["floor_by_phase_ms"], 0.45)
                    axis.text(place - 0.2, row["best_ms"], _short(row["best_ms"]), ha="center", va="bottom",
                              fontsize=7)  # fmt: skip
        axis.set_xticks(range(len(forms)), list(forms), fontsize=8)
        axis.set_title(name.replace("-", " "), fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.1)
    axes[0].set_ylabel("ms")
    figure.legend(handles=_legend(), fontsize=8, loc="lower center", ncols=len(PARTS))
    _save(figure, target)


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _stack(axis: Any, place: float, phases: Mapping[str, float], alpha: float) -> None:
    bottom = 0.0
    for names, colour in PARTS.values():
        height = sum(phases.get(name, 0.0) for name in names)
        axis.bar(place, height, 0.38, bottom=bottom, color=colour, alpha=alpha)
        bottom += height


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=part) for part, (_, colour) in reversed(PARTS.items())]


def _figure(forms: Forms, columns: int, title: str, rows: int = 1) -> tuple[Figure, list[Any]]:
    """With axes row by row."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "growth"  # else ids differ from one drawing to the next
    figure = Figure(figsize=(3.6 * columns + 1, 3.6 * rows + 0.4))
    axes = figure.subplots(rows, columns, squeeze=False)
    first = next(iter(forms.values()))
    about = f"{first['machine']['cpu']}, {first['machine']['cpus']} cores, {first['date'][:10]}"
    figure.suptitle(f"{first['settings']['model']}: {title}; {about}", fontsize=10)
    return figure, [axis for row in axes for axis in row]


def _save(figure: Figure, target: Path) -> None:
    figure.tight_layout(rect=(0, 0.06 if figure.legends else 0, 1, 1))
    figure.savefig(target, metadata={"Date": None})
