"""What was done to a watched fleet so far, as its clients know it, for stages that check panels by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pdserve.client import Result, WorkerStatus
from pdserve.insight import SecondsHistogram
from pdserve.obs.rates import quantile
from pdserve.types import Ledger
from tests.support.panels_seen import Seen
from tests.support.watched import Watched

LONG, SMALL, TOKENS = 100, 4, 8
"""Tokens of prompts that prefill computes, of those that decode does, and of answers."""
LEVELS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass
class Story:
    """finished: in full. The rest: how many ended otherwise."""

    fleet: Watched
    finished: list[Result] = field(default_factory=list)
    refused: int = 0
    shed: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.seen = Seen(self.fleet)

    @property
    def ledgers(self) -> list[Ledger]:
        return [result.ledger for result in self.finished]

    @property
    def modes(self) -> dict[str, list[Result]]:
        """Finished requests by who computed their prompts."""
        found: dict[str, list[Result]] = {}
        for result in self.finished:
            found.setdefault(mode_of(result), []).append(result)
        return found

    def means(self, of: Callable[[Result], float]) -> dict[str, float]:
        """A figure's mean by mode."""
        return {mode: fmean(map(of, results)) for mode, results in self.modes.items()}

    def worker(self, name: str) -> WorkerStatus:
        """A worker as its heartbeat tells it to the router."""
        return next(w for w in self.fleet.stack.status().workers if w.record.peer.worker_id == name)


def mode_of(result: Result) -> str:
    """Who computed a prompt, by the names that metrics have for it."""
    if result.ledger.prefill_worker:
        return "disaggregated"
    return "aggregated" if "aggregated" in result.ledger.decode_worker else "local"


def at_level(values: Iterable[float], buckets: Sequence[float], level: float) -> float:
    """The quantile that Prometheus sees of these values through these buckets."""
    counts = [0] * (len(buckets) + 1)
    for value in values:
        counts[next((i for i, bound in enumerate(buckets) if value <= bound), len(buckets))] += 1
    found = quantile(SecondsHistogram(bounds=tuple(buckets), counts=tuple(counts)), level)
    assert found is not None
    return found


def levels(values: Iterable[float], buckets: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile as a panel's three lines."""
    kept = list(values)
    return {name: at_level(kept, buckets, level) for name, level in LEVELS.items()}


def about(values: Iterable[float], buckets: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Bounds of the three lines where a metric and a ledger end the same stretch a moment apart."""
    kept = list(values)
    low, high = (
        levels((0.8 * v - 0.0005 for v in kept), buckets),
        levels((1.2 * v + 0.0005 for v in kept), buckets),
    )
    return {name: (low[name], high[name]) for name in LEVELS}
