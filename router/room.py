"""Decode workers that lately had no room: when to try them again, and with how many requests at once. Pure.

A worker that refused for want of room is asked again by one request at a time: with two hundred waiting, all
of them would go out, be refused and come back, several times a second. What does not live here: choosing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.types import Key

CAUTION_S = 1.0
"""So long after its last refusal a worker is given work as any other again."""


@dataclass(slots=True, kw_only=True)
class _Doubt:
    """What is known of one worker. until: it is not asked before; probe: the try it has not answered yet."""

    until: float
    refused_at: float
    probe: Key | None = None


class Room:
    """Workers in doubt, by incarnation. Times are on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._doubts: dict[int, _Doubt] = {}

    def refused(self, worker: int, now: float, for_s: float) -> None:
        """It has no room; ask again after `for_s`, or when one of our own requests ends there."""
        self._doubts[worker] = _Doubt(until=now + for_s, refused_at=now)

    def tried(self, worker: int, key: Key) -> None:
        """A try goes to this worker."""
        doubt = self._doubts.get(worker)
        if doubt is not None:
            doubt.probe = key

    def answered(self, worker: int, key: Key) -> bool:
        """The try was taken, or is over. Whether the next one may be sent because of that."""
        doubt = self._doubts.get(worker)
        if doubt is None or doubt.probe != key:
            return False
        doubt.probe = None
        return True

    def freed(self, worker: int) -> None:
        """A request ended there: it may have room before its time."""
        doubt = self._doubts.get(worker)
        if doubt is not None:
            doubt.until = doubt.refused_at

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._doubts.pop(worker, None)

    def closed(self, now: float) -> frozenset[int]:
        """Workers that get no request now."""
        over = [w for w, d in self._doubts.items() if d.probe is None and now >= d.refused_at + CAUTION_S]
        for worker in over:
            if now >= self._doubts[worker].until:
                del self._doubts[worker]
        return frozenset(w for w, d in self._doubts.items() if d.probe is not None or now < d.until)
