"""How a replica whose ranks divide experts alone goes on without one of them.

What lives here: judging a loss, and bringing those who are left into a new group. What does not: routing past
the lost rank (`rebalancing`), computing the step again (`runner`), noticing (`beats`).

    rank r is gone ─▶ beats' thread: have all its experts another home? no: the replica is over
                      yes: kill it, abort collectives ─▶ the step fails on all ranks
                      compute thread: REGROUP ─▶ ranks that are left, which answer; tables without r; again
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping

from pdserve.errors import WorkerLost
from pdserve.parallel.coverage import Coverage
from pdserve.parallel.placement_table import Placement
from pdserve.parallel.shm_group import make_segment
from pdserve.parallel.surviving_group import SurvivingGroup
from pdserve.ranks.frames import Kind, receive, send
from pdserve.ranks.tender import Word, decode

log = logging.getLogger(__name__)
WAIT_S = 2.0
"""A step that failed for another reason than a lost rank is known as such after so long."""
SERIAL_BYTES = 8


class Survival:
    """Of one replica. `spare` belongs to the beats' thread, the rest to the compute thread."""

    def __init__(
        self,
        group: SurvivingGroup,
        ranks: Mapping[int, socket.socket],
        table: Callable[[], Placement],
        kill: Callable[[int], None],
    ) -> None:
        """ranks: connections of ranks 1 and up. table: the present one, any thread. kill: ends a rank."""
        self._group, self._ranks = group, dict(ranks)
        self._table, self._kill = table, kill
        self._news = threading.Condition()
        self._fresh: set[int] = set()
        self._lost: frozenset[int] = frozenset()

    def spare(self, rank: int, reason: str) -> bool:
        """Whether the replica goes on without a rank that is lost; then its steps fail until `regroup`."""
        lost = self._lost | {rank}
        missing = Coverage(table=self._table(), lost=lost).missing
        if missing:
            log.error("this replica ends (%s): nobody else has expert %s", reason, missing)
            return False
        log.warning("this replica goes on without a rank: %s", reason)
        self._kill(rank)
        self._group.abort()  # before the news: who has them makes the next group
        with self._news:
            self._lost = lost
            self._fresh.add(rank)
            self._news.notify_all()
        return True

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that are lost, from the moment that it is known; any thread."""
        return self._lost

    @property
    def ranks(self) -> dict[int, socket.socket]:
        """Connections to those that are left."""
        return self._ranks

    def regroup(self) -> tuple[frozenset[int], dict[int, list[Word]]]:
        """After a step that failed: the ranks that are lost since the last time, and what the others have
        said meanwhile. None lost: it failed for another reason. Raises WorkerLost if one more is lost now."""
        with self._news:
            self._news.wait_for(lambda: bool(self._fresh), WAIT_S)
            fresh, self._fresh = frozenset(self._fresh), set()
        if not fresh:
            return fresh, {}
        self._ranks = {rank: sock for rank, sock in self._ranks.items() if rank not in fresh}
        alive = [0, *self._ranks]
        body = json.dumps(alive).encode()
        segment = make_segment(len(alive))
        try:
            for sock in self._ranks.values():
                send(sock, Kind.REGROUP, body, fd=segment)
            self._group.renew(segment, alive)
        finally:
            os.close(segment)
        return fresh, {rank: _joined(sock, body) for rank, sock in self._ranks.items()}


def _joined(sock: socket.socket, body: bytes) -> list[Word]:
    """What a rank says until it has joined."""
    words: list[Word] = []
    while True:
        frame = receive(sock)
        if frame.kind is Kind.REGROUP and frame.body == body:
            return words
        if frame.kind is Kind.DONE:
            words += decode(frame.body[SERIAL_BYTES:])
        elif frame.kind is not Kind.ABORTED and frame.kind is not Kind.REGROUP:
            raise WorkerLost("a rank of this replica is out of step")
