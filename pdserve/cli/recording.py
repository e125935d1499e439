"""A run as the dashboards saw it: every panel's lines over a time, from a live Prometheus or from a file.

A file is JSON that tells which panels it has, so that a picture can be drawn without the fleet, without
Prometheus and without Grafana. What does not live here: drawing (`panels`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.cli.prometheus import Prometheus, Series, finite
from pdserve.errors import ConfigError
from pdserve.obs.dashboards import Dashboard, Panel

FORMAT = 1
MAX_FILE_BYTES = 64 * 2**20
MIN_WINDOW_S = 60.0
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a panel. points: (seconds since 1970, value or None where there is none)."""

    legend: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The lines of one panel; none where its queries gave no data."""

    dashboard: str
    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Panels over one time. begin_s, end_s: since 1970. window_s: of rates. about: what was run, in words."""

    begin_s: float
    end_s: float
    step_s: float
    window_s: float
    panels: tuple[Recorded, ...]
    about: str = ""

    def lines(self, dashboard: str, title: str) -> tuple[Line, ...]:
        """A panel's lines; none where the recording does not have it."""
        found = [p for p in self.panels if (p.dashboard, p.title) == (dashboard, title)]
        return found[0].lines if found else ()

    def to_json(self) -> str:
        """What `recording_from` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The time to look at. window_s: of rates; 0 chooses four steps, a minute at least."""

    begin_s: float
    end_s: float
    step_s: float
    window_s: float = 0.0

    @property
    def rates_over_s(self) -> float:
        """The window that rates are taken over."""
        return self.window_s or max(MIN_WINDOW_S, 4 * self.step_s)


def record(prometheus: Prometheus, dashboards: Iterable[Dashboard], span: Span, about: str = "") -> Recording:
    """Asks for every panel. Raises PdserveError."""
    return Recording(
        begin_s=span.begin_s,
        end_s=span.end_s,
        step_s=span.step_s,
        window_s=span.rates_over_s,
        about=about,
        panels=tuple(
            Recorded(dashboard=board.uid, title=panel.title, lines=_lines(prometheus, panel, span))
            for board in dashboards
            for panel in board.panels
        ),
    )


def _lines(prometheus: Prometheus, panel: Panel, span: Span) -> tuple[Line, ...]:
    found: list[Line] = []
    for query in panel.queries:
        promql = query.promql(f"{max(1, round(span.rates_over_s))}s")
        for series in prometheus.query_range(promql, span.begin_s, span.end_s, span.step_s):
            points = tuple((moment, finite(value)) for moment, value in series.points)
            found.append(Line(legend=legend(query.legend, series), points=points))
    return tuple(found)


def legend(form: str, series: Series) -> str:
    """A line's name: `{{label}}` stands for the label's value."""
    return _LABEL.sub(lambda match: series.labels.get(match[1], ""), form).strip()


def recording_from(file: Path) -> Recording:
    """Reads a recording. Raises ConfigError for a file that is none."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError("recording: the file is too large to be one")
        return _recording(json.loads(file.read_bytes()))
    except OSError:
        raise ConfigError("recording: the file can not be read") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError("recording: the file is none that `pdserve dashboards record` wrote") from None


def _recording(data: Any) -> Recording:
    if data["format"] != FORMAT:
        raise ConfigError("recording: was written by another version of pdserve; record it again")
    return Recording(
        begin_s=_number(data["begin_s"]),
        end_s=_number(data["end_s"]),
        step_s=_number(data["step_s"]),
        window_s=_number(data["window_s"]),
        about=str(data["about"])[:200],
        panels=tuple(
            Recorded(
                dashboard=str(panel["dashboard"]),
                title=str(panel["title"]),
                lines=tuple(
                    Line(legend=str(line["legend"]), points=tuple(_point(p) for p in line["points"]))
                    for line in panel["lines"]
                ),
            )
            for panel in data["panels"]
        ),
    )


def _point(point: Any) -> Point:
    moment, value = point
    return _number(moment), None if value is None else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("is no number")
    return float(value)
