"""How much each expert was used lately: counts by layer and expert that halve with time. Pure: the clock
comes in.

What lives here: the window a planner reads. What does not: counting in the layer, and deciding when to plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import ConfigError

RENEW = 60.0
"""After so many half-lives the inner scale starts anew, long before a float overflows."""


class LoadWindow:
    """Tokens routed to each expert, each weighted by 1/2 for every half-life since it was counted.

    Instead of shrinking what is there on every call, what comes in grows; reading divides. Only the newest
    time counts: times that go back are taken as the newest one.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life_s: float) -> None:
        if num_layers < 1 or num_experts < 1:
            raise ConfigError("load window: at least one layer and one expert are needed")
        if not half_life_s > 0:
            raise ConfigError("half_life_s: must be more than 0")
        self._half_life_s = half_life_s
        self._start: float | None = None
        self._newest = 0.0
        self._scaled = [[0.0] * num_experts for _ in range(num_layers)]

    def add(self, layer: int, counts: Sequence[float], now: float) -> None:
        """Tokens routed to each expert of a layer since the last call. now: seconds of a monotonic clock."""
        weight, row = self._weight(now), self._scaled[layer]
        if len(counts) != len(row):
            raise ConfigError(f"load window: {len(counts)} counts for {len(row)} experts")
        for expert, count in enumerate(counts):
            if count:
                row[expert] += count * weight

    def loads(self, now: float) -> tuple[tuple[float, ...], ...]:
        """By layer and expert, the decayed counts at this time."""
        weight = self._weight(now)
        return tuple(tuple(scaled / weight for scaled in row) for row in self._scaled)

    def _weight(self, now: float) -> float:
        """What one token counts on the inner scale now. May renew the scale."""
        if self._start is None:
            self._start = self._newest = now
        self._newest = max(self._newest, now)
        lives = (self._newest - self._start) / self._half_life_s
        if lives > RENEW:
            shrink = 0.5**lives
            self._scaled = [[scaled * shrink for scaled in row] for row in self._scaled]
            self._start, lives = self._newest, 0.0
        return float(2.0**lives)
