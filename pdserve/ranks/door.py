"""The Unix socket where a replica's ranks report to their leader, and the checks at it.

What lives here: listening, and who may come in. What does not: what is said afterwards (`replica`).
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.shm.server import same_user
from pdserve.errors import ConfigError, WorkerLost
from pdserve.ranks.config import socket_path
from pdserve.ranks.frames import Kind, receive

_LOOK_S = 0.1
_HELLO_S = 5.0
_MAX_PATH_BYTES = 107  # sun_path
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank that has come in. work, life: its connections. pidfd: its process, even when that is gone."""

    work: socket.socket
    life: socket.socket
    pidfd: int


class Door:
    """Listens for the ranks 1 to size - 1 of one replica."""

    def __init__(self, directory: Path, token: str, size: int) -> None:
        """directory: private. token: what each must show. Raises ConfigError for a path that is too long."""
        path = socket_path(directory)
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError("run_dir: its path is too long for a Unix socket; choose a shorter one")
        self._token, self._size = token, size
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(path))
        self._sock.listen(4 * size)
        self._sock.settimeout(_LOOK_S)

    def admit(self, deadline: float, ended: Callable[[], int | None]) -> dict[int, Seat]:
        """Waits until every rank has both its connections. deadline: monotonic seconds. ended: the rank of a
        process that is over, or None. Raises WorkerLost."""
        found: dict[tuple[int, str], socket.socket] = {}
        while len(found) < 2 * (self._size - 1):
            if (rank := ended()) is not None:
                raise WorkerLost(f"rank {rank} of this replica ended while it started; its log says why")
            if time.monotonic() > deadline:
                raise WorkerLost("the ranks of this replica did not start in time")
            if (came := self._next()) is not None:
                found.setdefault(came[0], came[1])
        return {
            rank: Seat(work=found[rank, "work"], life=(life := found[rank, "life"]), pidfd=_pidfd(life))
            for rank in range(1, self._size)
        }

    def close(self) -> None:
        """Nobody comes in any more."""
        self._sock.close()

    def _next(self) -> tuple[tuple[int, str], socket.socket] | None:
        """The next connection with its rank and channel, if it is one of ours."""
        try:
            sock, _ = self._sock.accept()
        except TimeoutError:
            return None
        sock.settimeout(_HELLO_S)
        name = self._named(sock) if same_user(sock) else None
        if name is None:
            sock.close()
            return None
        return name, sock

    def _named(self, sock: socket.socket) -> tuple[int, str] | None:
        try:
            frame = receive(sock)
            hello = json.loads(frame.body)
            rank, token, channel = int(hello["rank"]), str(hello["token"]), str(hello["channel"])
        except (WorkerLost, ValueError, KeyError, TypeError):
            return None
        known = frame.kind is Kind.HELLO and hmac.compare_digest(token.encode(), self._token.encode())
        if not known or channel not in ("work", "life") or not 0 < rank < self._size:
            return None
        return rank, channel


def _pidfd(sock: socket.socket) -> int:
    """The process at the other end, as the kernel names it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    try:
        return os.pidfd_open(_CREDENTIALS.unpack(raw)[0])
    except OSError as error:
        raise WorkerLost("a rank of this replica ended while it started; its log says why") from error
