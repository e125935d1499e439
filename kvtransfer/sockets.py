"""TCP sockets of both ends, plain or TLS: what the transports that speak over TCP share.

What lives here: binding, dialling, and the TLS handshake with its limits. What does not: frames, and
accepting (`kvtransfer.listener`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kvtransfer.listener import Signal, wait_for
from kvtransfer.transport import ReaderConfig, ServerConfig
from pdserve.tls.sockets import secure_accepted, secure_dialled


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes a free one. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def address(sock: socket.socket) -> str:
    """host:port of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of host:port. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def accepting(config: ServerConfig, stop: Signal) -> Callable[[socket.socket], socket.socket] | None:
    """What a `Listener` secures connections with, each in its own thread, so that a silent peer delays nobody
    but itself. None if they are plain."""
    tls = config.tls
    if tls is None:
        return None

    def secure(sock: socket.socket) -> socket.socket:
        deadline = time.monotonic() + config.stall_s

        def go_on(end: socket.socket, mask: int) -> bool:
            wait_for(end, mask, stop, deadline)
            return not stop.is_set()

        return secure_accepted(sock, tls, go_on)

    return secure


def dialled(
    config: ReaderConfig, host: str, port: int, wake: Signal, closed: Callable[[], bool]
) -> socket.socket:
    """A connected, non-blocking socket to the reader's peer. wake, closed: give up when `closed` is true,
    which `wake` announces. Raises Untrusted, Stalled or OSError."""
    sock = socket.create_connection((host, port), timeout=config.stall_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    if config.tls is None:
        return sock
    deadline = time.monotonic() + config.stall_s

    def go_on(end: socket.socket, mask: int) -> bool:
        wake.clear()
        if not closed():
            wait_for(end, mask, wake, deadline)
        return not closed()

    return secure_dialled(sock, config.tls, host, go_on)
