"""Proxies on the data plane between a decode worker and a prefill worker: bytes damaged, held, cut.

What lives here: `ChaosProxy` for tcp, which knows frames, and `ChaosDoor` for shm's Unix socket, which passes
descriptors on. What does not: control messages (`tests.support.relay`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtransfer.wire import HEADER, Kind

Step = bytes | Callable[[], None]
PageHook = Callable[[int, bytes, bytearray], Iterable[Step]]
"""Called with how many pages came before, the frame's header and its payload; what it gives is sent, or
called, in order. Raising Cut ends the connection."""


class Cut(Exception):
    """Ends a connection at once, in the middle of whatever it is."""


def passed(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
    """The hook that changes nothing."""
    return [header, bytes(payload)]


def _receive(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise Cut
        view = view[count:]
    return data


class _Listener:
    """Accepts and serves each connection in a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._sock.accept()
                self._open.append(peer)
                threading.Thread(target=self._guarded, args=(peer,), daemon=True).start()

    def _guarded(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, Cut):
            self.serve(peer)
        _close(peer)

    def serve(self, peer: socket.socket) -> None:
        """One connection."""
        raise NotImplementedError

    def stop(self) -> None:
        """Closes everything."""
        for sock in (self._sock, *self._open):
            _close(sock)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class ChaosProxy(_Listener):
    """Between a tcp reader and its server. `page`: what happens to page frames."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.page: PageHook = passed
        self._number = 0
        sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        super().__init__(sock)

    def reset(self) -> None:
        """Passes everything on again."""
        self.page, self._number = passed, 0

    def serve(self, peer: socket.socket) -> None:
        """Asks go up as they are, answers come down frame by frame."""
        source = socket.create_connection(self._target)
        threading.Thread(target=self._upward, args=(peer, source), daemon=True).start()
        try:
            while True:
                for step in self._frame(source):
                    if callable(step):
                        step()
                    else:
                        peer.sendall(step)
        finally:
            _close(source)

    def _frame(self, source: socket.socket) -> Iterable[Step]:
        header = bytes(_receive(source, HEADER.size))
        kind, body_bytes, payload_bytes = (HEADER.unpack(header)[i] for i in (2, 5, 6))
        header += bytes(_receive(source, body_bytes))
        payload = _receive(source, payload_bytes)
        if kind != Kind.PAGE:
            return [header, bytes(payload)]
        self._number += 1
        return self.page(self._number - 1, header, payload)

    def _upward(self, peer: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := peer.recv(65536):
                source.sendall(data)
        _close(source)


DoorHook = Callable[[int], int]
"""Called with the pool's descriptor; gives the one to hand out. Raising Cut ends the connection."""


class ChaosDoor(_Listener):
    """Between a shm reader and the door where it gets the pool's descriptor."""

    def __init__(self, target: str, path: Path) -> None:
        self._target = target
        self.descriptor: DoorHook = lambda fd: fd
        self._held: list[tuple[socket.socket, socket.socket]] = []
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(os.fspath(path))
        sock.listen()
        self.address = os.fspath(path)
        super().__init__(sock)

    def reset(self) -> None:
        """Passes everything on again."""
        self.descriptor = lambda fd: fd

    def cut(self) -> None:
        """Breaks every connection there is."""
        while self._held:
            for sock in self._held.pop():
                _close(sock)

    def serve(self, peer: socket.socket) -> None:
        """The hello goes up, the answer comes down with a descriptor; then the connection just stays."""
        source = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        source.connect(self._target)
        self._held.append((peer, source))
        source.sendall(peer.recv(65536))
        answer, fds, _, _ = socket.recv_fds(source, 65536, 1)
        try:
            socket.send_fds(peer, [answer], [self.descriptor(fd) for fd in fds])
        finally:
            for fd in fds:
                os.close(fd)
        peer.recv(1)
        _close(source)
