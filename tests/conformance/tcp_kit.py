"""What the two suites of tcp under bad peers share: raw connections and hand-made frames."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvtransfer.tcp.reader import TcpPageReader
from kvtransfer.transport import PageReader, PageServer
from kvtransfer.wire import HEADER, Hello, Kind, Read
from tests.conformance.page_host import (
    KEY,
    LAYOUT,
    PAGE_BYTES,
    Host,
    reader_config,
    ticket,
)
from tests.conformance.transport_kit import WAIT_S

ANSWERS = frozenset(Kind)
FRAME_BYTES = HEADER.size + PAGE_BYTES
WELCOME_BYTES = HEADER.size + 24
PAGES_BY = "compiled"
"""How readers take pages; or "python"."""


@contextmanager
def reading(host: Host, endpoint: str, **changes: float) -> Iterator[PageReader]:
    config = reader_config(endpoint=endpoint, pool_id=host.pool.pool_id, **changes)
    with closing(TcpPageReader(config, compiled=PAGES_BY == "compiled")) as reader:
        yield reader


def dial(server: PageServer) -> socket.socket:
    host, _, port = server.endpoint().rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def hello(host: Host) -> bytes:
    greeting = Hello(pool_id=host.pool.pool_id, layout=LAYOUT.fingerprint(), key=KEY, ticket=ticket())
    return greeting.pack()


def wish(page: int, sequence: int) -> bytes:
    return Read(key=KEY, ticket=ticket(), pages=[(page, 1)]).pack(sequence)


def take(sock: socket.socket, size: int) -> bytes:
    """The next `size` bytes, or what comes before the end."""
    data = bytearray()
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return bytes(data)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes; waits for it."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def wait_count(server: PageServer, name: str, wanted: int, limit_s: float = 20.0) -> None:
    """Returns when a server's counter is as wanted. Fails at the limit."""
    end = time.monotonic() + limit_s
    while server.counters().get(name, 0) != wanted:
        assert time.monotonic() < end, dict(server.counters())
        os.sched_yield()
