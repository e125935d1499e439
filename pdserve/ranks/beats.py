"""Liveness inside a replica: each side says every tenth of a second that it lives, on a thread of its own.

What lives here: the thread, and when a peer counts as lost. What does not: what happens then (the caller's
`on_lost`, which ends the process). A rank that computes is not silent: the thread has no part in the step.

A closed connection is a dead process and counts at once. Silence counts from `arm` on, when everything is
loaded: before, a call that keeps the interpreter to itself for a second is nobody's death.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

from pdserve import failpoints

log = logging.getLogger(__name__)

BEAT_S = 0.1
SILENT_S = 0.7
"""With a beat and some scheduling it stays under the second within which a dead rank must be noticed."""
_BEAT, _ARMED = b".", b"A"


class Beats:
    """Beats to and from all peers of this process."""

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        on_lost: Callable[[str], None],
        *,
        spare: Callable[[int, str], bool] = lambda rank, reason: False,
        silent_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """peers: connections by rank, used by this object alone from now on. on_lost: called once, on the
        thread, with a reason in words. spare: asked before, on the
        thread too; whether to go on without that rank. silent_s: None is SILENT_S."""
        self._peers = dict(peers)
        self._on_lost, self._spare = on_lost, spare
        self._silent_s = silent_s or failpoints.setting("rank_silence") or SILENT_S
        self._clock = clock
        self._heard = dict.fromkeys(peers, clock())
        self._armed = self._closed = False
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        for sock in self._peers.values():
            sock.setblocking(False)

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def arm(self) -> None:
        """From now on silence counts, here and at the peers, who are told so."""
        self._heard = dict.fromkeys(self._peers, self._clock())
        self._armed = True

    def close(self) -> None:
        """Stops, closing the connections. Nothing is lost any more."""
        self._closed = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for sock in self._peers.values():
            sock.close()

    def _run(self) -> None:
        poller = select.poll()
        by_fd = {sock.fileno(): rank for rank, sock in self._peers.items()}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        due = self._clock()
        while not self._closed:
            left_s = due - self._clock()
            # What came in is read before anybody is judged: if we stood still, it is not the peer's fault.
            gone = [by_fd[fd] for fd, _ in poller.poll(max(0.0, left_s) * 1000) if not self._hear(by_fd[fd])]
            if gone and not self._goes_on(poller, gone[0], f"rank {gone[0]} ended"):
                return
            if self._clock() < due:
                continue
            due = self._clock() + BEAT_S
            self._say()
            if (silent := self._silent()) is not None:
                reason = f"rank {silent} has been silent for {self._silent_s:g} s"
                if not self._goes_on(poller, silent, reason):
                    return

    def _hear(self, rank: int) -> bool:
        """Reads what a peer said; False if its process is gone."""
        try:
            data = self._peers[rank].recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._heard[rank] = self._clock()
        if _ARMED in data and not self._armed:
            self.arm()
        return bool(data)

    def _say(self) -> None:
        for sock in self._peers.values():
            with contextlib.suppress(OSError):  # full: it does not listen; gone: the next poll says so
                sock.send(_ARMED if self._armed else _BEAT)

    def _silent(self) -> int | None:
        if not self._armed:
            return None
        now = self._clock()
        return next((rank for rank, at in self._heard.items() if now - at > self._silent_s), None)

    def _goes_on(self, poller: select.poll, rank: int, reason: str) -> bool:
        """After the loss of a peer; False: it was the last thing to say."""
        if self._closed or not self._spare(rank, reason):
            self._lose(reason)
            return False
        poller.unregister(self._peers[rank])
        self._peers.pop(rank).close()
        self._heard.pop(rank)
        return True

    def _lose(self, reason: str) -> None:
        if not self._closed:
            log.warning("this replica is over: %s", reason)
            self._on_lost(reason)
