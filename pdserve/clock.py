"""Time as a value. Pure code takes `now` as an argument; drivers take a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Its zero means nothing outside the process."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError("a clock can not go back")
        self._now += seconds
