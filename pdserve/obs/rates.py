"""What a fleet does now, from two looks at it: rates, and quantiles of the seconds between them. Pure.

What does not live here: asking the router, and drawing (`pdserve top`, the status page).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdserve.api import FleetStatus, SecondsHistogram, Traffic

BLOCKS = "▁▂▃▄▅▆▇█"
KEPT = 60
"""Looks that are kept for the sparklines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Between two looks. Rates are by second; quantiles in seconds, None where nothing was measured."""

    completion_tokens: float = 0.0
    prompt_tokens: float = 0.0
    cached_share: float | None = None
    requests: float = 0.0
    failures: float = 0.0
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None


def rates(before: Traffic, after: Traffic, seconds: float) -> Rates:
    """What happened between two looks that are `seconds` apart. A router that started anew counts from 0."""
    if seconds <= 0:
        return Rates()
    if after.completion_tokens < before.completion_tokens:
        before = Traffic()
    prompt = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    ttft, itl = _between(before.ttft, after.ttft), _between(before.itl, after.itl)
    return Rates(
        completion_tokens=(after.completion_tokens - before.completion_tokens) / seconds,
        prompt_tokens=prompt / seconds,
        cached_share=cached / prompt if prompt else None,
        requests=(after.finished_requests - before.finished_requests) / seconds,
        failures=(after.failed_requests - before.failed_requests) / seconds,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        itl_p50=quantile(itl, 0.5),
        itl_p99=quantile(itl, 0.99),
    )


def _between(before: SecondsHistogram, after: SecondsHistogram) -> SecondsHistogram:
    if before.bounds != after.bounds:
        return after
    counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
    return SecondsHistogram(bounds=after.bounds, counts=counts, sum=after.sum - before.sum)


def quantile(seconds: SecondsHistogram, share: float) -> float | None:
    """The value below which a share of the counts lies, linear within its bucket as Prometheus'
    histogram_quantile does; the highest bound for values above it. None without counts."""
    total = sum(seconds.counts)
    if total <= 0 or not seconds.bounds:
        return None
    target, below, low = share * total, 0, 0.0
    for bound, count in zip(seconds.bounds, seconds.counts, strict=False):
        if count and below + count >= target:
            return min(bound, low + (bound - low) * max(0.0, target - below) / count)
        below, low = below + count, bound
    return seconds.bounds[-1]


def sparkline(values: list[float | None], width: int) -> str:
    """The last `width` values as blocks, scaled to the greatest; a dot where there is none."""
    shown = values[-width:]
    top = max((value for value in shown if value is not None), default=0.0)
    if top <= 0:
        return "".join("·" if value is None else BLOCKS[0] for value in shown)
    return "".join("·" if v is None else BLOCKS[round(v / top * (len(BLOCKS) - 1))] for v in shown)


class History:
    """The last looks at one router. Rates of a router that was restarted begin anew."""

    def __init__(self) -> None:
        self.rates: deque[Rates] = deque(maxlen=KEPT)
        self._last: tuple[float, FleetStatus] | None = None

    def push(self, status: FleetStatus, now: float) -> None:
        """A new look, at `now` (seconds of any clock that only goes forward)."""
        if self._last is not None and self._last[1].router_id == status.router_id:
            then, before = self._last
            self.rates.append(rates(before.traffic, status.traffic, now - then))
        self._last = (now, status)

    @property
    def now(self) -> Rates:
        """Between the last two looks."""
        return self.rates[-1] if self.rates else Rates()

    def of(self, name: str) -> list[float | None]:
        """One figure over time, oldest first."""
        return [getattr(each, name) for each in self.rates]
