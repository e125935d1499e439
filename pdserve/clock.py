"""Time as a value. Pure code takes `now` as an argument; drivers take a `Clock`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Its zero means nothing outside the process."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


_skew_s, _rate = 0.0, 1.0


def monotonic() -> float:
    """This process's one monotonic clock, seconds: what its event loop and all its stamps go by."""
    return _skew_s + _rate * time.monotonic()


def at(seconds: float) -> float:
    """What `monotonic` said when the machine's monotonic clock said `seconds`, for compiled code's stamps."""
    return _skew_s + _rate * seconds


def skew(seconds: float, rate: float) -> None:
    """Sets this process's clock wrong, for tests (failpoints clock_offset, clock_rate). Call it before
    `new_event_loop`. rate: by what share it runs fast."""
    global _skew_s, _rate
    _skew_s, _rate = seconds, 1.0 + rate


class _Loop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return monotonic()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose time is `monotonic`."""
    return _Loop()


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        return monotonic()


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
