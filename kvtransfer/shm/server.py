"""The source end of the shm transport: hands the pool's descriptor, read-only, to readers who may have it.

What lives here: the private Unix socket, the checks before the descriptor goes out. What does not: the pool
(`pdserve.kvcache.pool`), copying (`kvtransfer.shm.reader`). A reader that has mapped the pool is trusted with
all of it: tickets guard the door here, and the announces of pages; page numbers guard nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from kvtransfer.hello import judge
from kvtransfer.listener import Listener, Signal, wait_for
from kvtransfer.reads import Counters
from kvtransfer.stream import FrameReceiver
from kvtransfer.transport import PageSource, ServerConfig
from kvtransfer.wire import Code, Hello, Kind, WireError
from pdserve.errors import ConfigError

_MAX_PATH_BYTES = 107  # sun_path
_CREDENTIALS = struct.Struct("3i")


class ShmPageServer:
    """A `PageServer` that passes the pool's descriptor."""

    def __init__(self, source: PageSource, config: ServerConfig) -> None:
        self._source, self._config = source, config
        self._counters, self._stop = Counters(), Signal()
        self._listener: Listener | None = None
        self._path = Path(config.directory, f"{source.facts.pool_id:016x}.sock")
        self._read_only_fd = -1

    def start(self) -> None:
        """Makes the socket in its private directory and accepts. Raises ConfigError or OSError."""
        directory = private_directory(self._config.directory)
        path = directory / self._path.name
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError("directory: its path is too long for a Unix socket; choose a shorter one.")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fsencode(path))
            self._read_only_fd = read_only(self._source.facts.fd)
        except OSError:
            sock.close()
            raise
        self._path = path
        self._listener = Listener(
            sock,
            serve=self._serve,
            stop=self._stop,
            max_connections=self._config.max_connections,
            counters=self._counters,
        )
        self._listener.start()

    def endpoint(self) -> str:
        """The path of the Unix socket."""
        return str(self._path)

    def counters(self) -> Mapping[str, int]:
        """See PageServer."""
        return self._counters.snapshot()

    def close(self) -> None:
        """See PageServer. Readers that have the pool mapped keep its memory, which nobody writes any more."""
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None
            os.close(self._read_only_fd)
            self._stop.close()

    def _serve(self, sock: socket.socket) -> None:
        if not same_user(sock):
            self._counters.add("foreign_user")
            return
        receiver = FrameReceiver(sock, expect=frozenset({Kind.HELLO}))
        deadline = time.monotonic() + self._config.stall_s
        while (frame := receiver.pump()) is None:
            wait_for(sock, select.POLLIN, self._stop, deadline)
            if self._stop.is_set():
                return
        if self._answer(sock, Hello.unpack(frame.body)):
            self._keep(sock)

    def _answer(self, sock: socket.socket, hello: Hello) -> bool:
        code, answer = judge(hello, self._source)
        if code is not Code.NONE:
            self._counters.add("refused")
            sock.sendall(answer)
            return False
        socket.send_fds(sock, [answer], [self._read_only_fd])
        self._counters.add("mapped")
        return True

    def _keep(self, sock: socket.socket) -> None:
        """Holds the connection, by which the reader sees that we live, until it leaves or we stop."""
        wait_for(sock, select.POLLIN, self._stop, math.inf)
        if not self._stop.is_set() and sock.recv(1):
            raise WireError("a mapped reader has nothing to say")


def private_directory(name: str) -> Path:
    """The directory, made if need be, which must be ours alone. Raises ConfigError or OSError."""
    path = Path(name)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError("directory: it must be a directory of this user with mode 0700.")
    return path


def read_only(fd: int) -> int:
    """A new, read-only opening of the file behind `fd`: a descriptor that can not be mapped writable."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as our user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())
