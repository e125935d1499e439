"""Keeps the router of `pdserve up` running: when its process ends by itself, another takes its port.

What lives here: when to start it again. What does not: one process (`router_child`), workers (the fleet).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.cli.router_child import RouterChild
from pdserve.errors import PdserveError

HEALTHY_AFTER_S = 30.0
"""A router that ran this long is started again at once when it ends."""
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0


class RouterKeeper:
    """One router after another, at one address. Main thread only: each ends with the thread that made it."""

    def __init__(
        self,
        start: Callable[[int | None, int | None, int | None], RouterChild],
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the first. start: takes the ports of gRPC, metrics and HTTP, None where the configuration
        decides. Raises the router's own error."""
        self._start, self._say, self._clock = start, say, clock
        self.child = start(None, None, None)
        self._ports = _port(self.child.address), self.child.metrics_port or None, _port(self.child.http_url)
        self._started_at = clock()
        self._failures = 0
        self._again_at: float | None = None

    def watch(self) -> None:
        """Looks after the router; call it often. It may block while one starts."""
        if self.child.alive():
            return
        now = self._clock()
        if self._again_at is None:
            self._again_at = now + self._backoff(now)
            self._say("the router ended by itself; it is started again, requests under way are lost")
        if now >= self._again_at:
            self._restart()

    def _backoff(self, now: float, *, listened: bool = True) -> float:
        """How long to wait now; the first failure after a good time costs nothing. listened: it did; one that
        took long to fail at its start had no good time."""
        healthy = listened and now - self._started_at >= HEALTHY_AFTER_S
        self._failures = 0 if healthy else self._failures + 1
        if self._failures <= 1:
            return 0.0
        return float(min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._failures - 2)))

    def _restart(self) -> None:
        self._again_at = None
        try:
            self.child = self._start(*self._ports)
        except PdserveError as error:
            now = self._clock()
            self._again_at = now + self._backoff(now, listened=False)
            self._say(f"the router can not be started: {error.message}")
        else:
            self._started_at = self._clock()
            self._say(f"the router listens on {self.child.address} again")

    def kill(self) -> None:
        """Ends the one that runs, at once."""
        self.child.kill()


def _port(address: str) -> int | None:
    """The port at an address' end."""
    port = address.rpartition(":")[2]
    return int(port) if port else None
