"""Tools of the transport suite: a destination that keeps count, and a proxy that mistreats a connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvtransfer.transport import PageReader, ReadDone, ReadRequest, ReadStatus
from pdserve.types import Key, PageName
from tests.conformance.page_host import KEY, NUM_PAGES, PAGE_BYTES, content, digest, ticket

GUARD = 64
WAIT_S = 20


class Destination:
    """Target pages with guard bytes around them, and every ReadDone that came."""

    def __init__(self, pool_id: int, num_pages: int = NUM_PAGES) -> None:
        self._pool_id = pool_id
        self._stride = PAGE_BYTES + GUARD
        self.memory = bytearray(b"\xa5" * (GUARD + num_pages * self._stride))
        self.changed = threading.Condition()
        self.done: list[ReadDone] = []

    def target(self, slot: int) -> memoryview:
        start = GUARD + slot * self._stride
        return memoryview(self.memory)[start : start + PAGE_BYTES]

    def untouched(self, slot: int) -> bool:
        return bytes(self.target(slot)) == b"\xa5" * PAGE_BYTES

    def wait_touched(self, slot: int) -> bool:
        """Waits until a byte of the slot was written. The writer can't tell us, so this looks and yields."""
        end = time.monotonic() + WAIT_S
        while self.untouched(slot) and time.monotonic() < end:
            os.sched_yield()
        return not self.untouched(slot)

    def guards_whole(self) -> bool:
        """Whether no byte outside the targets was written."""
        starts = range(0, len(self.memory), self._stride)
        return all(self.memory[at : at + GUARD] == b"\xa5" * GUARD for at in starts)

    def request(self, slot: int, *, page: int | None = None, **changes: Any) -> ReadRequest:
        """A read of `page` (or the slot's number) into `slot`; read_id and index are the slot."""
        page = slot if page is None else page
        generation = changes.pop("generation", 1)
        pool_id = changes.pop("pool_id", self._pool_id)
        values: dict[str, Any] = {
            "read_id": slot,
            "key": KEY,
            "ticket": ticket(),
            "source": PageName(pool_id=pool_id, page=page, generation=generation),
            "index": slot,
            "valid_rows": 16,
            "digest": changes.get("digest") or digest(content(max(page, 0)), slot),
            "target": self.target(slot),
        }
        return ReadRequest(**(values | changes))

    def read(self, reader: PageReader, slot: int, **changes: Any) -> None:
        reader.read(self.request(slot, **changes), self.note)

    def note(self, done: ReadDone) -> None:
        with self.changed:
            self.done.append(done)
            self.changed.notify_all()

    def wait(self, count: int) -> list[ReadDone]:
        """The first `count` ends, once they are there."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) >= count, WAIT_S), self.done
            return self.done[:count]

    def one(self, reader: PageReader, slot: int, **changes: Any) -> ReadDone:
        """Reads one page and returns its end."""
        count = len(self.done)
        self.read(reader, slot, **changes)
        return self.wait(count + 1)[count]

    def statuses(self) -> dict[int, ReadStatus]:
        """The status of each read; fails if one ended twice."""
        with self.changed:
            ids = [done.read_id for done in self.done]
            assert len(ids) == len(set(ids))
            return {done.read_id: done.status for done in self.done}

    def check_good(self, slots: Iterator[int] | range | list[int]) -> None:
        """All these slots ended well and hold their page."""
        statuses = self.statuses()
        for slot in slots:
            assert statuses[slot] is ReadStatus.GOOD
            assert bytes(self.target(slot)) == content(slot)


def other_key() -> tuple[Key, bytes]:
    """Another request and its ticket."""
    key = Key(request_id="request-2")
    return key, ticket(key)


Mistreat = Callable[[socket.socket, bytes, int], bool]
"""Passes bytes on: (to, data, bytes passed before) -> whether to go on."""


def slices(to: socket.socket, data: bytes, before: int) -> bool:
    """One byte at a time."""
    for at in range(len(data)):
        to.sendall(data[at : at + 1])
    return True


def cut_after(limit: int) -> Mistreat:
    """Closes after `limit` bytes."""

    def cut(to: socket.socket, data: bytes, before: int) -> bool:
        to.sendall(data[: max(0, limit - before)])
        return before + len(data) < limit

    return cut


class Gate:
    """Holds everything after `limit` bytes back until it is opened."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, to: socket.socket, data: bytes, before: int) -> bool:
        if before + len(data) >= self._limit and not self.open.is_set():
            head = max(0, self._limit - before)
            to.sendall(data[:head])
            self.reached.set()
            assert self.open.wait(WAIT_S)
            data = data[head:]
        to.sendall(data)
        return True


@contextmanager
def proxy(endpoint: str, mistreat: Mistreat) -> Iterator[str]:
    """The endpoint of a proxy in front of a tcp server; what the server says goes through `mistreat`."""
    host, _, port = endpoint.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets = [listener]

    def pump(source: socket.socket, to: socket.socket, treat: Mistreat) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and treat(to, data, passed):
                passed += len(data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                open_sockets.extend((near, far))
                threading.Thread(target=pump, args=(far, near, mistreat), daemon=True).start()
                threading.Thread(target=pump, args=(near, far, _pass_on), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        for sock in open_sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _pass_on(to: socket.socket, data: bytes, before: int) -> bool:
    to.sendall(data)
    return True
