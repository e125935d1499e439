"""Follows a fleet on a thread of its own: the last status for those who ask, and word to the controller.

What lives here: when the fleet was last heard of. What does not: pages and metrics made of it (`port`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from pdserve.errors import InternalError, Unavailable
from pdserve.fleet.handle import FleetHandle, Status

log = logging.getLogger("pdserve.fleet")

ASK_EVERY_S = 1.0
LOST_AFTER_S = 60.0
"""A controller, a Ray head or a connection that is away for longer does not come back to us."""


class FleetWatch:
    """Asks for the status at every change, and once a second, which is also the owner's sign of life."""

    def __init__(self, handle: FleetHandle, clock: Callable[[], float] = time.monotonic) -> None:
        self._handle, self._clock = handle, clock
        self._stop = threading.Event()
        self._status: Status | None = None
        self._heard_at = clock()
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[FleetWatch]:
        """Watches for the time of the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(2 * ASK_EVERY_S)

    def status(self) -> Status | None:
        """What the controller said last; None before its first answer."""
        return self._status

    def silent_s(self) -> float:
        """Seconds since the controller's last answer."""
        return self._clock() - self._heard_at

    def lost(self) -> bool:
        """Whether the fleet has been silent for so long that we do not wait for it any more."""
        return self.silent_s() > LOST_AFTER_S

    def ready(self) -> bool:
        """Whether as many workers of each role serve as are wanted."""
        told = self._status is not None and bool(self._status["enough_serving"])
        return told and not (self.lost() or self._handle.ending)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._status = self._handle.next_status(ASK_EVERY_S, patient=False)
                self._heard_at = self._clock()
            except (Unavailable, InternalError) as err:
                if not self._handle.ending:
                    log.info("the fleet can not be asked: %s", err.message)
                self._stop.wait(ASK_EVERY_S)
