"""Dashboards drawn with matplotlib: each panel in the place, kind and unit that Grafana would give it.

What does not live here: where the numbers come from (`recording`), and what panels there are
(`pdserve.obs.dashboards`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.recording import Line, Recording
from pdserve.errors import ConfigError
from pdserve.obs.dashboards import Colour, Dashboard, Kind, Panel, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 24
WIDTH_INCHES, ROW_INCHES, HEAD_INCHES, DPI = 14.0, 2.3, 0.5, 75
_COLOURS = {Colour.GOOD: "#2f9e44", Colour.WARNING: "#e8890c", Colour.BAD: "#d6336c"}
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_MAX_LEGEND = 8
_TICKS_S = (15, 30, 60, 120, 300, 600, 1800, 3600, 10_800, 21_600, 86_400)


def draw(dashboard: Dashboard, recording: Recording, file: Path) -> None:
    """Writes the picture; its kind by the file's ending. Raises ConfigError where it can not be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'pdserve[bench]'") from None
    rows = list(_rows(dashboard.panels))
    tall = [0.5 if all(panel.kind is Kind.STAT for panel in row) else 1.0 for row in rows]
    height = ROW_INCHES * sum(tall) + HEAD_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height))
    figure.suptitle(_title(dashboard, recording), fontsize=11, y=1 - 0.1 / height, va="top")
    grid = figure.add_gridspec(
        len(rows), COLUMNS, left=0.055, right=0.985, hspace=0.5, wspace=3.0, height_ratios=tall,
        bottom=0.35 / height, top=1 - (HEAD_INCHES + 0.25) / height,
    )  # fmt: skip
    for number, row in enumerate(rows):
        left = 0
        for panel in row:
            axes = figure.add_subplot(grid[number, left : left + panel.width])
            _panel(axes, panel, recording, dashboard.uid)
            left += panel.width
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    try:
        figure.savefig(file, dpi=DPI)
    except (OSError, ValueError):
        raise ConfigError("output: can not be written; name a directory that can, and .png or .svg") from None


def _title(dashboard: Dashboard, recording: Recording) -> str:
    begin = datetime.fromtimestamp(recording.begin_s, UTC)
    minutes = (recording.end_s - recording.begin_s) / 60
    about = f"\n{recording.about}" if recording.about else ""
    return f"{dashboard.title}, {minutes:.0f} min from {begin:%Y-%m-%d %H:%M} UTC{about}"


def _rows(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Panels as Grafana places them: in order, as many in a row as fit."""
    row: list[Panel] = []
    for panel in panels:
        if row and sum(each.width for each in row) + panel.width > COLUMNS:
            yield row
            row = []
        row.append(panel)
    if row:
        yield row


def _panel(axes: Axes, panel: Panel, recording: Recording, uid: str) -> None:
    lines = [line for line in recording.lines(uid, panel.title) if any(v is not None for _, v in line.points)]
    axes.set_title(panel.title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not lines:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color="grey", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if panel.kind is Kind.STAT:
        _stat(axes, panel, lines)
        return
    {Kind.STACKED: _stacked, Kind.HEATMAP: _heat}.get(panel.kind, _plot)(axes, lines, recording)
    _scales(axes, panel, recording)


def _plot(axes: Axes, lines: Sequence[Line], recording: Recording) -> None:
    for line in lines:
        axes.plot(
            [moment - recording.begin_s for moment, _ in line.points],
            [math.nan if value is None else value for _, value in line.points],
            label=line.legend,
            linewidth=1.2,
        )
    _legend(axes, lines)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), high if high > 0 else 1.0)


def _stacked(axes: Axes, lines: Sequence[Line], recording: Recording) -> None:
    """Lines that are 0 all the time would only fill the legend."""
    shown = [line for line in lines if any(value for _, value in line.points)] or lines[:1]
    moments = sorted({moment for line in shown for moment, _ in line.points})
    heights = [[dict(line.points).get(moment) or 0.0 for moment in moments] for line in shown]
    axes.stackplot(
        [m - recording.begin_s for m in moments], heights, labels=[line.legend for line in shown], alpha=0.8
    )
    _legend(axes, shown)
    axes.set_ylim(bottom=0)


def _heat(axes: Axes, lines: Sequence[Line], recording: Recording) -> None:
    """Cumulated buckets by their upper bound, drawn as how many fell into each."""
    bounded = sorted((float(line.legend), dict(line.points)) for line in lines if line.legend != "+Inf")
    moments = sorted({moment for _, points in bounded for moment in points})
    counts = [[points.get(moment) or 0.0 for moment in moments] for _, points in bounded]
    own = [counts[0], *([b - a for a, b in zip(low, high, strict=True)] for low, high in pairwise(counts))]
    half = recording.step_s / 2
    edges = [moments[0] - recording.begin_s - half, *(m - recording.begin_s + half for m in moments)]
    axes.pcolormesh(edges, range(len(own) + 1), own, cmap="Blues")
    axes.set_yticks(range(1, len(own) + 1, 2), [_shown(bound, Unit.SECONDS) for bound, _ in bounded[::2]])


def _stat(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    """The newest numbers, large, coloured by the panel's steps."""
    axes.axis("off")
    shown = lines[:4]
    for number, line in enumerate(shown):
        value = next(v for _, v in reversed(line.points) if v is not None)
        at = (number + 0.5) / len(shown)
        colour = _COLOURS[_colour(panel, value)]
        text = _shown(value, panel.unit)
        axes.text(
            at, 0.5, text, ha="center", va="center", fontsize=18, color=colour, transform=axes.transAxes
        )
        axes.text(at, 0.2, line.legend, ha="center", fontsize=8, color="grey", transform=axes.transAxes)


def _colour(panel: Panel, value: float) -> Colour:
    colour = Colour.GOOD
    for step in panel.steps:
        colour = step.colour if value >= step.value else colour
    return colour


def _legend(axes: Axes, lines: Sequence[Line]) -> None:
    if any(line.legend for line in lines) and len(lines) <= _MAX_LEGEND:
        axes.legend(fontsize=6.5, loc="upper left", framealpha=0.6, ncols=1 + (len(lines) > 4))


def _scales(axes: Axes, panel: Panel, recording: Recording) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    span_s = max(recording.end_s - recording.begin_s, 1.0)
    axes.set_xlim(0, span_s)
    between_s = next((step for step in _TICKS_S if span_s / step <= 6), span_s)
    axes.xaxis.set_major_locator(MultipleLocator(between_s))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / 60:.3g} min"))
    if panel.kind is not Kind.HEATMAP:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, panel.unit)))
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.25)


def _shown(value: float, unit: Unit) -> str:
    """A number with its unit, short."""
    if unit is Unit.SECONDS:
        if abs(value) >= 120:
            return f"{value / 60:.4g} min"
        small = 0 < abs(value) < 1
        return f"{value * 1000:.4g} ms" if small else f"{value:.4g} s"
    if unit is Unit.RATIO:
        return f"{100 * value:.4g} %"
    if unit in (Unit.BYTES, Unit.BYTES_PER_SECOND):
        power = min(len(_BYTES) - 1, int(math.log(abs(value), 1024))) if abs(value) >= 1 else 0
        return f"{value / 1024**power:.4g} {_BYTES[power]}" + ("/s" if unit is Unit.BYTES_PER_SECOND else "")
    end = {Unit.PER_SECOND: "/s", Unit.REQUESTS_PER_SECOND: "/s", Unit.TOKENS_PER_SECOND: "/s"}.get(unit, "")
    return f"{value:,.4g}{end}"
