"""A source of pages for the transport suite: a host in this process, or in a process of its own.

What lives here: a small pool with known content, the thread-safe callbacks a server needs, tickets, and a
line protocol on stdin and stdout by which a test steers a source process. No test lives here.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.digest import page_digest
from kvtransfer.tcp.reader import TcpPageReader
from kvtransfer.ticket import Side, TicketFacts, mint, verify
from kvtransfer.transport import PageServer, PoolFacts, ReaderConfig, ServerConfig, Transport, transport
from pdserve.errors import PermissionRefused
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.types import HandoverMode, Key
from tests.support.certs import Certs

CERTS_VARIABLE = "PDSERVE_TEST_TLS_DIR"
ROOT = Path(__file__).parents[2]
SECRET = b"the secret of the transport suite"
INCARNATION = 4711
KEY = Key(request_id="request-1", epoch=1)
LAYOUT = PageLayout(num_layers=4, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32", inner="test")
NUM_PAGES = 64
PAGE_BYTES = LAYOUT.page_bytes
EXTENT: dict[str, Any] = {"layout": LAYOUT.fingerprint(), "layer_first": 0, "layer_last": 3, "shard": 0}


def ticket(
    key: Key = KEY, *, secret: bytes = SECRET, expires: float = 1e12, incarnation: int = INCARNATION
) -> bytes:
    """A ticket as the router would mint it."""
    facts = TicketFacts(
        key=key,
        prefill_incarnation=incarnation,
        decode_incarnation=1,
        emitter="decode",
        mode=HandoverMode.DISAGGREGATED,
        tenant="tenant",
        request_hash=bytes(32),
        page_budget=NUM_PAGES,
        num_choices=1,
        prefill_expires=expires,
        decode_expires=expires,
    )
    return mint(secret, facts)


def content(page: int) -> bytes:
    """What the page holds at first."""
    return np.random.default_rng(page).bytes(PAGE_BYTES)


def digest(payload: bytes | bytearray, index: int) -> bytes:
    """The digest of a full page at `index`."""
    return page_digest(memoryview(payload), index=index, valid_rows=16, **EXTENT)


class Host:
    """A `PageSource` over a real pool; `before_pin` and `before_payload` are hooks on the server's thread."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.pool = KVPool.create(LAYOUT, num_pages, secrets.randbits(64))
        self._facts = PoolFacts(
            pool_id=self.pool.pool_id,
            layout=LAYOUT.fingerprint(),
            num_pages=num_pages,
            page_bytes=PAGE_BYTES,
            stride_bytes=LAYOUT.stride_bytes,
            fd=self.pool.fd,
        )
        self.changed = threading.Condition()
        self.pins: dict[str, int] = {}
        self.before_pin: Callable[[int], None] = lambda page: None
        for page in range(num_pages):
            self.pool.set_generation(page, 1)
            self.pool.page_view(page)[:] = content(page)

    @property
    def facts(self) -> PoolFacts:
        return self._facts

    def authorise(self, ticket: bytes, key: Key) -> bool:
        try:
            verify(SECRET, ticket, now=time.monotonic(), side=Side.PREFILL, key=key, incarnation=INCARNATION)
        except PermissionRefused:
            return False
        return True

    def payload(self, page: int) -> memoryview:
        return self.pool.page_view(page)

    def generation(self, page: int) -> int:
        return self.pool.generation(page)

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        self.before_pin(page)
        with self.changed:
            if self.pool.generation(page) != generation:
                return False
            assert pin_id not in self.pins
            self.pins[pin_id] = page
            self.changed.notify_all()
            return True

    def unpin(self, pin_id: str) -> None:
        with self.changed:
            del self.pins[pin_id]
            self.changed.notify_all()

    def wait_pins(self, count: int, timeout_s: float = 20) -> bool:
        """Waits until exactly `count` pins are held."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.pins) == count, timeout_s)

    def wait_pinned(self, timeout_s: float = 20) -> bool:
        """Waits until any pin is held."""
        with self.changed:
            return self.changed.wait_for(lambda: bool(self.pins), timeout_s)

    def flip(self, page: int, at: int) -> None:
        """Turns one byte of a page, as a broken memory would."""
        self.pool.page_view(page)[at] ^= 0xFF

    def renew(self, page: int) -> None:
        """Frees a page, as far as readers can tell."""
        self.pool.set_generation(page, self.pool.generation(page) + 1)

    def reader_config(self, server: PageServer, **changes: Any) -> ReaderConfig:
        """What a reader of this host is told."""
        return reader_config(**({"endpoint": server.endpoint(), "pool_id": self.pool.pool_id} | changes))

    @contextmanager
    def serving(self, name: str, directory: Path, **config: Any) -> Iterator[PageServer]:
        """A started server of that transport, closed at the end."""
        server = way(name).server(self, ServerConfig(directory=str(directory), **config))
        server.start()
        try:
            yield server
        finally:
            server.close()
        assert self.pins == {}


def way(name: str) -> Transport:
    """The transport of that name; with "+tls" it has the suite's certificates at both ends, and "tcp+python"
    takes its pages without compiled code."""
    plain, _, secure = name.partition("+")
    found = transport(plain)
    if not secure:
        return found
    if secure == "python":
        return Transport(server=found.server, reader=partial(TcpPageReader, compiled=False))
    tls = suite_certs().source()
    return Transport(
        server=lambda source, config: found.server(source, replace(config, tls=tls)),
        reader=lambda config: found.reader(replace(config, tls=tls)),
    )


@lru_cache
def suite_certs() -> Certs:
    """One set for this process and the source processes it starts."""
    if CERTS_VARIABLE not in os.environ:
        os.environ[CERTS_VARIABLE] = tempfile.mkdtemp(prefix="pdserve-test-certs-")
        atexit.register(shutil.rmtree, os.environ[CERTS_VARIABLE], ignore_errors=True)
    return Certs(Path(os.environ[CERTS_VARIABLE]))


def reader_config(**values: Any) -> ReaderConfig:
    """A reader's configuration for the suite's layout."""
    return ReaderConfig(**({"page_bytes": PAGE_BYTES} | EXTENT | values))


class SourceProcess:
    """A host in a process of its own."""

    def __init__(self, name: str, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.conformance.page_host", name, str(directory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        hello = self._answer()
        self.endpoint: str = hello["endpoint"]
        self.pool_id: int = hello["pool_id"]

    @property
    def pid(self) -> int:
        """Its process id; 0 once it has ended."""
        return self._process.pid if self._process.poll() is None else 0

    def do(self, action: str, *arguments: int) -> Any:
        """Calls a method of the host over there."""
        assert self._process.stdin is not None
        print(json.dumps([action, *arguments]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def reader_config(self, **changes: Any) -> ReaderConfig:
        """What a reader of this process is told."""
        return reader_config(**({"endpoint": self.endpoint, "pool_id": self.pool_id} | changes))

    def kill(self) -> None:
        """Ends it without a word to anybody."""
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Waits for the process, which leaves when its stdin closes."""
        with self._process:
            pass


def main() -> None:
    """Serves until stdin closes."""
    name, directory = sys.argv[1:]
    host = Host()
    with host.serving(name, Path(directory)) as server:
        print(json.dumps({"endpoint": server.endpoint(), "pool_id": host.pool.pool_id}), flush=True)
        actions = {"flip": host.flip, "renew": host.renew, "generation": host.generation}
        for line in sys.stdin:
            action, *arguments = json.loads(line)
            print(json.dumps(actions[action](*arguments)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
