"""How fast the data plane moves pages: shm and tcp beside plain memcpy and a bare socket loop.

What lives here: one measured run of all, interleaved, between two processes; progress on stderr, a table
on stdout, JSON to a file if asked. What does not: anything about requests, or a network other than loopback.

    python -m benchmarks.transfer [--page-kib 360] [--pages 256] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.digest import page_digest
from kvtransfer.transport import (
    PageReader,
    PoolFacts,
    ReadDone,
    ReaderConfig,
    ReadRequest,
    ReadStatus,
    ServerConfig,
    transport,
)
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.types import Key, PageName

KEY = Key(request_id="benchmark")
EXTENT: dict[str, Any] = {"layer_first": 0, "layer_last": 0, "shard": 0}
WAIT_S = 60.0


def layout(page_kib: int) -> PageLayout:
    """A page of that many KiB."""
    return PageLayout(
        num_layers=1, num_kv_heads=1, head_dim=8 * page_kib, page_size=16, dtype="float32", inner="bench"
    )


class Source:
    """A `PageSource` whose pages never change; generation 1, any ticket will do."""

    def __init__(self, page_kib: int, num_pages: int) -> None:
        shape = layout(page_kib)
        self.pool = KVPool.create(shape, num_pages, secrets.randbits(64))
        self.pool.prefault()
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

    def authorise(self, ticket: bytes, key: Key) -> bool:
        return key == KEY

    def payload(self, page: int) -> memoryview:
        return self.pool.page_view(page)

    def generation(self, page: int) -> int:
        return self.pool.generation(page)

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        return self.pool.generation(page) == generation

    def unpin(self, pin_id: str) -> None:
        return None


def serve(page_kib: int, num_pages: int, directory: str) -> None:
    """The source process: both transports and a bare loop; leaves when stdin closes."""
    source = Source(page_kib, num_pages)
    servers = [transport(name).server(source, ServerConfig(directory=directory)) for name in ("shm", "tcp")]
    for server in servers:
        server.start()
    bare = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_bare, args=(bare, source), daemon=True).start()
    endpoints = [server.endpoint() for server in servers]
    print(json.dumps([source.pool.pool_id, *endpoints, bare.getsockname()[1]]), flush=True)
    sys.stdin.read()
    for server in servers:
        server.close()


def _serve_bare(listener: socket.socket, source: Source) -> None:
    """For each byte that comes, all pages go."""
    sock, _ = listener.accept()
    while sock.recv(1):
        for page in range(source.facts.num_pages):
            sock.sendall(source.payload(page))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The destination's memory: page views, and the digests that the source's pages must have."""

    views: list[memoryview]
    digests: list[bytes]


def make_target(page_kib: int, num_pages: int) -> Target:
    """Backed memory for all pages."""
    size = layout(page_kib).page_bytes
    arena = memoryview(mmap.mmap(-1, size * num_pages))
    views = [arena[page * size : (page + 1) * size] for page in range(num_pages)]
    fingerprint = layout(page_kib).fingerprint()
    digests = []
    for page, view in enumerate(views):
        view[:] = bytes([page % 251]) * size
        digests.append(page_digest(view, layout=fingerprint, index=page, valid_rows=16, **EXTENT))
    return Target(views=views, digests=digests)


def pull(reader: PageReader, target: Target, pool_id: int) -> None:
    """Reads all pages, as many at once as there are. Raises RuntimeError if one is not good."""
    finished, bad = threading.Event(), []
    left = [len(target.views)]

    def note(done: ReadDone) -> None:
        left[0] -= 1
        if done.status is not ReadStatus.GOOD:
            bad.append(done)
        if not left[0]:
            finished.set()

    for page, view in enumerate(target.views):
        request = ReadRequest(
            read_id=page,
            key=KEY,
            ticket=b"",
            source=PageName(pool_id=pool_id, page=page, generation=1),
            index=page,
            valid_rows=16,
            digest=target.digests[page],
            target=view,
        )
        reader.read(request, note)
    if not finished.wait(WAIT_S) or bad:
        raise RuntimeError(f"{len(bad)} pages went wrong")


def pull_bare(sock: socket.socket, target: Target) -> None:
    """The same bytes by the plainest loop there is."""
    sock.sendall(b"x")
    for view in target.views:
        at = 0
        while at < len(view):
            at += sock.recv_into(view[at:])


def copy_all(source: Target, target: Target) -> None:
    """Plain memcpy, page by page."""
    for there, here in zip(source.views, target.views, strict=True):
        np.copyto(np.frombuffer(here, np.uint8), np.frombuffer(there, np.uint8))


def copy_and_check(source: Target, target: Target, fingerprint: str) -> None:
    """The least that a verified copy can cost in one thread: memcpy, then the digest."""
    for page, (there, here) in enumerate(zip(source.views, target.views, strict=True)):
        np.copyto(np.frombuffer(here, np.uint8), np.frombuffer(there, np.uint8))
        if page_digest(here, layout=fingerprint, index=page, valid_rows=16, **EXTENT) != target.digests[page]:
            raise RuntimeError("a copy went wrong")


def measure(cases: dict[str, Callable[[], None]], rounds: int, size_bytes: int) -> dict[str, list[float]]:
    """GB/s of each case in each round, the cases interleaved; one unmeasured round first."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            rate = size_bytes / (time.perf_counter() - start) / 1e9
            print(f"round {number}/{rounds}  {name:<13} {rate:6.2f} GB/s", file=sys.stderr, flush=True)
            if number:
                rates[name].append(rate)
    return rates


def run(page_kib: int, num_pages: int, rounds: int) -> dict[str, list[float]]:
    """Starts the source process and measures against it."""
    print(f"source process with {num_pages} pages of {page_kib} KiB ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "benchmarks.transfer", "--serve", directory]
        command += ["--page-kib", str(page_kib), "--pages", str(num_pages)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            pool_id, shm, tcp, port = json.loads(process.stdout.readline())
            try:
                return _run_against(page_kib, num_pages, rounds, pool_id, {"shm": shm, "tcp": tcp}, port)
            finally:
                process.stdin.close()


def _run_against(
    page_kib: int, num_pages: int, rounds: int, pool_id: int, endpoints: dict[str, str], port: int
) -> dict[str, list[float]]:
    shape, target = layout(page_kib), make_target(page_kib, num_pages)
    plain = make_target(page_kib, num_pages)
    readers = {
        name: transport(name).reader(
            ReaderConfig(
                endpoint=endpoint,
                pool_id=pool_id,
                layout=shape.fingerprint(),
                page_bytes=shape.page_bytes,
                **EXTENT,
            )
        )
        for name, endpoint in endpoints.items()
    }
    with socket.create_connection(("127.0.0.1", port)) as bare:
        cases: dict[str, Callable[[], None]] = {
            "memcpy": lambda: copy_all(plain, target),
            "memcpy+digest": lambda: copy_and_check(plain, target, shape.fingerprint()),
            "shm": lambda: pull(readers["shm"], target, pool_id),
            "bare": lambda: pull_bare(bare, target),
            "tcp": lambda: pull(readers["tcp"], target, pool_id),
        }
        try:
            return measure(cases, rounds, num_pages * shape.page_bytes)
        finally:
            for reader in readers.values():
                reader.close()


def report(rates: dict[str, list[float]], page_kib: int, num_pages: int) -> dict[str, Any]:
    """Medians and paired ratios; prints the table."""
    bases = {"memcpy": (), "memcpy+digest": ("memcpy",), "shm": ("memcpy", "memcpy+digest")}
    bases |= {"bare": (), "tcp": ("bare",)}
    rows = []
    print(f"{'way':<15}{'GB/s':>6}   median of paired ratios (shm and tcp verify every page)")
    for name, found in rates.items():
        ratios = {base: _paired(found, rates[base]) for base in bases[name]}
        rate = round(statistics.median(found), 2)
        rows.append({"case": name, "gb_per_s": rate, "ratios": ratios})
        print(
            f"{name:<15}{rate:>6.2f}   " + "  ".join(f"{ratio:.2f}x {base}" for base, ratio in ratios.items())
        )
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    return {"page_kib": page_kib, "pages": num_pages, "machine": machine, "rows": rows}


def _paired(rates: list[float], others: list[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(rates, others, strict=True)), 2)


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description="GB/s of the KV data plane on this machine")
    parser.add_argument("--page-kib", type=int, default=360)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.page_kib, options.pages, options.serve)
        return
    rates = run(options.page_kib, options.pages, options.rounds)
    result = report(rates, options.page_kib, options.pages)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
