"""How far a worker's monotonic clock is from the router's: the best of the last round trips. Pure.

A heartbeat's round trip bounds the offset to within half its length; the shortest one of the last few says
most (the filter of NTP, RFC 5905 section 10). Clocks drift, so an older trip is trusted less by DRIFT times
its age: a new one takes over before the drift matters. Offsets between two workers go by way of the router.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdserve.types import ClockOffset, ClockSample

WINDOW = 32
ONE_WAY_ERROR_S = 1.0
DRIFT = 400e-6
"""Seconds per second: how fast two clocks may part. Real ones stay below 100 ppm, one that is off at 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trip:
    offset_s: float
    half_s: float
    at: float

    def error(self, now: float) -> float:
        return self.half_s + DRIFT * abs(now - self.at)


@dataclass(slots=True)
class ClockFilter:
    """The offset of one worker's clock. Times are the router's."""

    one_way_s: float = 0.0
    """The offset if its first message had taken no time: all there is before the first round trip."""
    _trips: deque[_Trip] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, sample: ClockSample) -> None:
        """Takes a round trip in. One that took less than no time is none."""
        there = sample.received_s - sample.sent_s
        back = sample.replied_s - sample.answered_s
        half = (there - back) / 2
        if half >= 0 and sample.replied_s >= sample.received_s:
            trip = _Trip(offset_s=(there + back) / 2, half_s=half, at=sample.replied_s)
            self._trips.append(trip)

    def estimate(self, worker: str, now: float) -> ClockOffset:
        """The offset now."""
        best = min(self._trips, key=lambda trip: trip.error(now), default=None)
        if best is None:
            return ClockOffset(worker=worker, offset_s=self.one_way_s, uncertainty_s=ONE_WAY_ERROR_S)
        return ClockOffset(worker=worker, offset_s=best.offset_s, uncertainty_s=best.error(now))
