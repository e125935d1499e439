"""The routers of a client: who gets the next call, and who is left alone because calls there failed.

What lives here: counting and choosing. What does not: connections (`connect`), and whether a failed call is
made again (`retry`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_REST_S, MAX_REST_S = 0.25, 10.0
MAX_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class Endpoint:
    """One router. stub: gives the stub for new calls. outstanding: calls under way there. failures: in a row;
    it is left alone until down_until."""

    address: str
    stub: Callable[[], Any]
    outstanding: int = 0
    failures: int = 0
    down_until: float = 0.0
    last_taken: int = 0


class Pool:
    """All routers of one client. Any thread may use it."""

    def __init__(self, endpoints: Sequence[Endpoint], clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoints = tuple(endpoints)
        self._clock, self._taken = clock, 0
        self._lock = threading.Lock()
        self._admitted: OrderedDict[str, Endpoint] = OrderedDict()

    def take(self, tried: Collection[Endpoint], only: Endpoint | None = None) -> Endpoint:
        """The router for one call, which counts there until `done`: none of those tried or resting if there
        is another, then the one with the fewest calls, then the one whose turn it is."""
        with self._lock:
            now = self._clock()
            found = only or min(self.endpoints, key=lambda each: self._order(each, tried, now))
            self._taken += 1
            found.outstanding += 1
            found.last_taken = self._taken
            return found

    @staticmethod
    def _order(each: Endpoint, tried: Collection[Endpoint], now: float) -> tuple[bool, bool, int, int]:
        # After its rest one call finds out whether it is back; the others wait for what that one says.
        resting = each.failures > 0 and (now < each.down_until or each.outstanding > 0)
        return each in tried, resting, each.outstanding, each.last_taken

    def others(self, tried: Collection[Endpoint]) -> bool:
        """Whether there are routers besides those tried."""
        return any(each not in tried for each in self.endpoints)

    def done(self, endpoint: Endpoint) -> None:
        """A call there is over, however it ended."""
        with self._lock:
            endpoint.outstanding -= 1

    def failed(self, endpoint: Endpoint) -> None:
        """No answer came from there: it rests, twice as long each time. Calls failing together count once."""
        with self._lock:
            now = self._clock()
            if now >= endpoint.down_until:
                endpoint.down_until = now + min(FIRST_REST_S * 2.0**endpoint.failures, MAX_REST_S)
                endpoint.failures = min(endpoint.failures + 1, 16)

    def answered(self, endpoint: Endpoint) -> None:
        """An answer came from there: it is well."""
        with self._lock:
            endpoint.failures, endpoint.down_until = 0, 0.0

    def admitted(self, request_id: str, endpoint: Endpoint) -> None:
        """Remembers which router knows a request, of the last 4,096."""
        with self._lock:
            self._admitted[request_id] = endpoint
            if len(self._admitted) > MAX_REMEMBERED:
                self._admitted.popitem(last=False)

    def asked_for(self, request_id: str) -> tuple[Endpoint, ...]:
        """The routers that may know a request: the one that admitted it here, else all."""
        with self._lock:
            found = self._admitted.get(request_id)
            return self.endpoints if found is None else (found,)
