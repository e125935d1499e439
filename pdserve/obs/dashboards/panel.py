"""What a dashboard is: panels with a title, a unit, a description and queries in PromQL. Plain data.

Here: the types, and the few forms of query that panels share. Not here: which panels there are (a module for
each dashboard), and how Grafana writes them down (`grafana`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WINDOW = "$__rate_interval"
"""What queries say for the window of a rate; Grafana fills it in, others use `Query.promql`."""


class Unit(StrEnum):
    """What a panel's numbers are, by Grafana's names."""

    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    RATIO = "percentunit"
    COUNT = "short"
    CORES = "suffix: cores"
    PER_SECOND = "cps"
    REQUESTS_PER_SECOND = "reqps"
    TOKENS = "suffix: tokens"
    TOKENS_PER_SECOND = "suffix: tokens/s"


class Kind(StrEnum):
    """How a panel is drawn. stacked: a time series whose lines add up. heatmap: buckets of one histogram."""

    LINES = "lines"
    STACKED = "stacked"
    STAT = "stat"
    HEATMAP = "heatmap"


class Colour(StrEnum):
    """Colours that mean something."""

    GOOD = "green"
    WARNING = "yellow"
    BAD = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel. legend: the line's name; `{{label}}` stands for a label's value."""

    expr: str
    legend: str

    def promql(self, window: str = "1m") -> str:
        """The query with this window for its rates, such as "30s": what Prometheus itself understands."""
        return self.expr.replace(WINDOW, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """From this value on, this colour."""

    value: float
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. width: of 24 columns. steps: colours of a number by its value; below the first, green."""

    title: str
    unit: Unit
    description: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of panels. uid: its name in addresses and files."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def query(expr: str, legend: str = "") -> Query:
    """A query; line breaks and indentation of the source become single spaces."""
    return Query(expr=" ".join(expr.split()), legend=legend)


def rate(metric: str, by: str = "") -> str:
    """The summed rate of a counter, per second. metric: with its matchers. by: labels to keep."""
    kept = f" by ({by}) " if by else ""
    return f"sum{kept}(rate({metric}[{WINDOW}]))"


def share(part: str, whole: str, by: str = "") -> str:
    """What share of one counter's events another one's are: 0 to 1, and no number while there are none."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def mean(histogram: str, by: str = "", matchers: str = "") -> str:
    """The mean of what a histogram observed within the window; no number while it observed nothing."""
    return share(f"{histogram}_sum{matchers}", f"{histogram}_count{matchers}", by)


def quantile(level: float, histogram: str, by: str = "", matchers: str = "") -> str:
    """A quantile of what a histogram observed within the window, exact to the width of its buckets."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({level:g}, {rate(f'{histogram}_bucket{matchers}', labels)})"


def quantiles(histogram: str, matchers: str = "") -> tuple[Query, ...]:
    """Median, 95th and 99th percentile as three lines."""
    levels = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    return tuple(query(quantile(level, histogram, "", matchers), name) for level, name in levels)
