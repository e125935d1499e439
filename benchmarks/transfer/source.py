"""The source of a transfer benchmark, a process of its own: a pool that never changes, all transports on it.

What lives here: that process, both ends of talking to it. What does not: what is done with its pages.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.nixl import agent as nixl
from kvtransfer.transport import PoolFacts, ServerConfig, transport
from pdserve.cli.certs import run as make_certificates
from pdserve.garbage import keep_what_is_loaded
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.tls import TlsFiles, TlsSource
from pdserve.types import Key

LOOPBACK = "127.0.0.1"


def layout(page_kib: int) -> PageLayout:
    """A page of that many KiB."""
    return PageLayout(
        num_layers=1, num_kv_heads=1, head_dim=8 * page_kib, page_size=16, dtype="float32", inner="bench"
    )


def identity(directory: Path, name: str) -> TlsSource:
    """The certificate of that name, "node" or "client"."""
    paths = (directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key")
    return TlsSource(TlsFiles.of(*map(str, paths)), serves=name == "node")  # type: ignore[arg-type]


class Source:
    """A `PageSource` whose pages never change; generation 1, any ticket will do. pinned_s: when a page was
    last pinned, monotonic."""

    def __init__(self, page_kib: int, num_pages: int) -> None:
        shape = layout(page_kib)
        self.pool = KVPool.create(shape, num_pages, secrets.randbits(64))
        for page in range(num_pages):
            self.pool.page_view(page)[:] = bytes([page % 251]) * shape.page_bytes
            self.pool.set_generation(page, 1)
        self.facts = PoolFacts(
            pool_id=self.pool.pool_id,
            layout=shape.fingerprint(),
            num_pages=num_pages,
            page_bytes=shape.page_bytes,
            stride_bytes=shape.stride_bytes,
            fd=self.pool.fd,
        )
        self.pinned_s = 0.0

    def authorise(self, ticket: bytes, key: Key) -> bool:
        return True

    def payload(self, page: int) -> memoryview:
        return self.pool.page_view(page)

    def generation(self, page: int) -> int:
        return self.pool.generation(page)

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        self.pinned_s = time.monotonic()
        return self.pool.generation(page) == generation

    def unpin(self, pin_id: str) -> None:
        return None


def serve(page_kib: int, num_pages: int, directory: Path) -> None:
    """The source process: all transports and a bare loop. Answers each line of stdin, leaves at its end."""
    source = Source(page_kib, num_pages)
    configs = {"shm": ("shm", {}), "tcp": ("tcp", {})}
    configs["tls"] = ("tcp", {"tls": identity(directory / "tls", "node")})
    if nixl.available():
        configs["nixl"] = ("nixl", {})
    servers = {}
    for name, (kind, changes) in configs.items():
        servers[name] = transport(kind).server(
            source, ServerConfig(directory=str(directory / "d"), **changes)
        )
        servers[name].start()
    facts: dict[str, Any] = {name: server.endpoint() for name, server in servers.items()}
    facts |= {"pool_id": source.pool.pool_id, "bare": _start_bare(source)}
    keep_what_is_loaded()  # as a worker does
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print(json.dumps([time.process_time(), source.pinned_s]), flush=True)
    for server in servers.values():
        server.close()


def _start_bare(source: Source) -> int:
    listener = socket.create_server((LOOPBACK, 0))
    threading.Thread(target=_serve_bare, args=(listener, source), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve_bare(listener: socket.socket, source: Source) -> None:
    """For each byte that comes, all pages go."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pages = [source.payload(page) for page in range(source.facts.num_pages)]
    while sock.recv(1):
        for page in pages:
            sock.sendall(page)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The source process as the measuring one sees it. facts: endpoints by name, and more."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]
    directory: Path

    def ask(self) -> tuple[float, float]:
        """CPU seconds that it has used; when it last pinned a page."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        cpu_s, pinned_s = json.loads(self.process.stdout.readline())
        return cpu_s, pinned_s


@contextmanager
def running(page_kib: int, num_pages: int, directory: Path) -> Iterator[Remote]:
    """Starts the source process; it ends with the context. directory: empty, for sockets and certificates."""
    with contextlib.redirect_stdout(io.StringIO()):  # its advice is for operators
        make_certificates(directory / "tls", (LOOPBACK,), 3)
    command = [sys.executable, "-m", "benchmarks.transfer", "--serve", str(directory)]
    command += ["--page-kib", str(page_kib), "--pages", str(num_pages)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield Remote(process=process, facts=json.loads(process.stdout.readline()), directory=directory)
        finally:
            process.stdin.close()
