"""What a dashboard's panels show in a real Prometheus, compared with what a test did.

A panel is named "overview/Requests"; its lines go by their legend, with a worker's name in place of its
address. Queries are the panels' own, with an hour for the window of rates: times 3,600, at the moment of a
process's last scrape, a rate is exactly what was counted since the fleet started, as its first sample was 0.
What does not live here: the fleet and what is sent to it (`watched`), and what each panel must show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.cli.recording import legend
from pdserve.obs.dashboards import DASHBOARDS
from tests.support.prometheus import LIMIT_S
from tests.support.watched import Watched

HOUR_S = 3600.0
PANELS = {
    f"{board.uid.removeprefix('pdserve-')}/{panel.title}": panel
    for board in DASHBOARDS
    for panel in board.panels
}

Lines = dict[str, float]
Bounds = Mapping[str, tuple[float, float]]


@dataclass
class Seen:
    """A fleet's panels. moved: those that showed what they had to."""

    fleet: Watched
    moved: set[str] = field(default_factory=set)

    def lines(self, name: str, at_s: float | None = None) -> Lines:
        """A panel's lines now, or at a moment; those without a number are left out."""
        names, found = self._names(), Lines()
        for query in PANELS[name].queries:
            for series in self.fleet.prometheus.query(query.promql("1h"), at_s):
                line = legend(query.legend, series)
                for address, process in names.items():
                    line = line.replace(address, process)
                if not math.isnan(value := series.points[-1][1]):
                    found[line] = value
        return found

    def shows(self, name: str, want: Mapping[str, float], *, close: float = 1e-6) -> None:
        """Waits until these lines have these values. close: the relative error they may have. Lines that are
        not named are not looked at."""
        self.agrees(name, lambda: want, close=close)

    def agrees(self, name: str, ask: Callable[[], Mapping[str, float]], *, close: float = 1e-6) -> None:
        """As `shows`, with what is wanted asked anew at each look."""
        self._until(name, lambda lines: _fits(lines, _bounds(ask(), close)), 1.0)

    def counts(self, name: str, want: Mapping[str, float], *, close: float = 1e-6) -> None:
        """As `shows`, of events since the start; of what is not named nothing may have happened."""
        bounds = _bounds(want, close)
        self._until(name, lambda lines: _fits(lines, bounds) and _none(lines, want), HOUR_S)

    def between(self, name: str, want: Bounds, *, scale: float = 1.0) -> None:
        """Waits until the lines lie within these bounds, after being multiplied."""
        self._until(name, lambda lines: _fits(lines, want), scale)

    def _until(self, name: str, fits: Callable[[Lines], bool], scale: float) -> None:
        end = time.monotonic() + LIMIT_S
        while True:
            looks = [self._scaled(name, scale, at_s) for at_s in (*self._scrapes(), None)]
            if any(fits(lines) for lines in looks):
                self.moved.add(name)
                return
            assert time.monotonic() < end, (name, looks)

    def _scaled(self, name: str, scale: float, at_s: float | None) -> Lines:
        return {line: value * scale for line, value in self.lines(name, at_s).items()}

    def _names(self) -> dict[str, str]:
        """Workers by the address of their metrics; the router's too."""
        found = self.fleet.prometheus.query("last_over_time(up[1h])")
        return {s.labels["instance"]: s.labels.get("worker") or s.labels["process"] for s in found}

    def _scrapes(self) -> list[float]:
        """The moments at which each process was looked at last."""
        found = self.fleet.prometheus.query("timestamp(up) and up == 1")
        return sorted({series.points[-1][1] for series in found})


def _bounds(want: Mapping[str, float], close: float) -> Bounds:
    return {line: (v - abs(v) * close - 1e-9, v + abs(v) * close + 1e-9) for line, v in want.items()}


def _fits(lines: Lines, want: Bounds) -> bool:
    return all(low <= lines.get(line, math.nan) <= high for line, (low, high) in want.items())


def _none(lines: Lines, want: Mapping[str, float]) -> bool:
    return not any(value for line, value in lines.items() if line not in want)
