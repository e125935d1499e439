"""Heat maps as SVG text: a grid of values, its colours, axes and legend. Written by us.

A picture needs no plotting library here: matplotlib belongs to the benchmarks' extra, and a worker's host
should not need it to see its experts. Any browser shows SVG. What lives here knows nothing of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log2

COLOURS = (
    "#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6",
    "#fdd49e", "#fdbb84", "#fc8d59", "#ef6548", "#d7301f", "#990000",
)  # fmt: skip
"""Blue up to 1, red above; one step a factor of the square root of two."""
MARGIN, WIDTH, CELL = 60, 900, 14
"""Pixels: around a panel, of the widest grid, of a cell at most."""
TICKS = 12
"""Labels on an axis at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """values: rows of equal length; 1 is the mean. columns, rows: what they are. labels: of the rows."""

    title: str
    columns: str
    rows: str
    labels: Sequence[str]
    values: Sequence[Sequence[float]]


def heat_map(title: str, panels: Sequence[Panel]) -> str:
    """A whole SVG document: panels below each other, and the legend."""
    legend, top = _legend(40.0)
    parts = [_text(MARGIN, 24, title, 14), *legend]
    for panel in panels:
        drawn, top = _panel(panel, top)
        parts += drawn
    size = f'width="{WIDTH + 2 * MARGIN}" height="{top + 10:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def level_of(value: float) -> int:
    """Index of the colour of a value relative to the mean."""
    if value <= 0:
        return 0
    return min(len(COLOURS) - 1, max(0, int(2 * log2(value) + len(COLOURS) // 2)))


def _panel(panel: Panel, top: float) -> tuple[list[str], float]:
    width, height = len(panel.values[0]), len(panel.values)
    cell = min(CELL, WIDTH / width)
    tall = max(3.0, min(CELL, 480 / height))
    left, first = MARGIN, top + 30
    parts = [_text(left, top + 20, panel.title, 13)]
    grid = f'<g transform="translate({left} {first:.1f}) scale({cell:.4f} {tall:.4f})" stroke-width="1">'
    parts += [grid, *_cells(panel.values), "</g>"]
    end = first + tall * height
    for column in range(0, width, -(-width // TICKS)):
        parts.append(_text(left + (column + 0.5) * cell, end + 14, str(column), 10, "middle"))
    for row in range(0, height, -(-height // TICKS)):
        parts.append(_text(left - 6, first + (row + 0.5) * tall + 3, panel.labels[row], 10, "end"))
    parts.append(_text(left + cell * width / 2, end + 28, panel.columns, 11, "middle"))
    turned = f'transform="translate(14 {(first + end) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text {turned} font-size="11" text-anchor="middle">{escape(panel.rows)}</text>')
    return parts, end + 36


def _cells(values: Sequence[Sequence[float]]) -> list[str]:
    """One path a colour, with the runs of cells that have it: a picture of 15,000 cells stays small."""
    runs: dict[int, list[str]] = {}
    for y, row in enumerate(values):
        levels = [level_of(value) for value in row]
        start = 0
        for x in range(1, len(levels) + 1):
            if x == len(levels) or levels[x] != levels[start]:
                runs.setdefault(levels[start], []).append(f"M{start} {y + 0.5}h{x - start}")
                start = x
    return [f'<path stroke="{COLOURS[level]}" d="{"".join(runs[level])}"/>' for level in sorted(runs)]


def _legend(top: float) -> tuple[list[str], float]:
    parts = []
    for level, colour in enumerate(COLOURS):
        x = MARGIN + 60 * level
        parts.append(f'<rect x="{x}" y="{top:.0f}" width="60" height="10" fill="{colour}" stroke="#ccc"/>')
        edge = 2 ** ((level - len(COLOURS) // 2) / 2)
        parts.append(_text(x, top + 22, "0" if level == 0 else f"{edge:.2g}x", 9))
    parts.append(_text(MARGIN + 60 * len(COLOURS) + 8, top + 9, "of the layer's mean", 10))
    return parts, top + 26


def _text(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {at}>{escape(words)}</text>"
