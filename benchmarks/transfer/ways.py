"""The ways to move all pages of the source into our memory: our transports, and the plainest code beside.

What lives here: each way, and the list of those that this machine can go. What does not: the clock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.nixl_raw import raw_reads
from benchmarks.transfer.source import LOOPBACK, Remote, identity, layout
from kvtransfer.digest import DIGEST_BYTES, page_digest
from kvtransfer.mover import PageMover
from kvtransfer.shm.reader import MappedPool, ShmPageReader, map_remote_pool
from kvtransfer.tcp.reader import TcpPageReader
from kvtransfer.transport import PageReader, ReadDone, ReaderConfig, ReadRequest, ReadStatus, transport
from pdserve.types import Key, PageName

KEY = Key(request_id="benchmark")
EXTENT: dict[str, Any] = {"layer_first": 0, "layer_last": 0, "shard": 0}
WAIT_S = 60.0
NO_DIGEST = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to move all pages. bases: what it is compared with. descriptor_bytes: of one contiguous piece."""

    name: str
    pull: Callable[[], None]
    descriptor_bytes: int
    bases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The destination's memory, backed: page views, and the digests that the source's pages must have."""

    memory: mmap.mmap
    views: list[memoryview]
    digests: list[bytes]
    page_bytes: int

    @classmethod
    def make(cls, page_kib: int, num_pages: int) -> Target:
        """Filled with what the source's pages hold, so that every byte of it has been touched."""
        shape = layout(page_kib)
        memory = mmap.mmap(-1, shape.stride_bytes * num_pages)
        whole, views, digests = memoryview(memory), [], []
        for page in range(num_pages):
            view = whole[page * shape.stride_bytes :][: shape.page_bytes]
            view[:] = bytes([page % 251]) * shape.page_bytes
            views.append(view)
            digests.append(page_digest(view, layout=shape.fingerprint(), index=page, valid_rows=16, **EXTENT))
        return cls(memory=memory, views=views, digests=digests, page_bytes=shape.page_bytes)


def request(target: Target, pool_id: int, page: int, *, digest: bytes | None = None) -> ReadRequest:
    """A read of one page into its place."""
    return ReadRequest(
        read_id=page,
        key=KEY,
        ticket=b"",
        source=PageName(pool_id=pool_id, page=page, generation=1),
        index=page,
        valid_rows=16,
        digest=target.digests[page] if digest is None else digest,
        target=target.views[page],
    )


def pull(reader: PageReader, requests: Sequence[ReadRequest]) -> None:
    """Reads pages, as many at once as there are. Raises RuntimeError if one is not good."""
    finished, bad = threading.Event(), []
    left = [len(requests)]

    def note(done: ReadDone) -> None:
        left[0] -= 1
        if done.status is not ReadStatus.GOOD:
            bad.append(done)
        if not left[0]:
            finished.set()

    for read in requests:
        reader.read(read, note)
    if not finished.wait(WAIT_S) or bad:
        raise RuntimeError(f"{len(bad)} pages went wrong: {bad[:1]}")


class NoDigest:
    """In place of a `PageDigester`: what a transport costs without."""

    def __init__(self, header: bytes) -> None:
        pass

    def __call__(self, payload: memoryview, *, index: int, valid_rows: int) -> bytes:
        return NO_DIGEST


def copying_mover(*, header: bytes | None, **rest: int) -> PageMover:
    """A mover that takes no digests."""
    return PageMover(header=None, **rest)


def reader_config(remote: Remote, page_kib: int, name: str, **changes: Any) -> ReaderConfig:
    """What a reader of the source is told."""
    shape = layout(page_kib)
    return ReaderConfig(
        endpoint=remote.facts[name],
        pool_id=remote.facts["pool_id"],
        layout=shape.fingerprint(),
        page_bytes=shape.page_bytes,
        **EXTENT,
        **changes,
    )


def pull_bare(sock: socket.socket, target: Target) -> None:
    """The same bytes by the plainest loop there is."""
    sock.sendall(b"x")
    for view in target.views:
        at = 0
        while at < len(view):
            at += sock.recv_into(view[at:])


def copy_all(pool: MappedPool, target: Target) -> None:
    """Plain memcpy out of the very mapping that shm reads, page by page, without the interpreter lock."""
    for page, view in enumerate(target.views):
        here = ctypes.addressof(ctypes.c_char.from_buffer(view))
        ctypes.memmove(here, pool.page_address(page), target.page_bytes)


def copy_and_check(pool: MappedPool, target: Target, fingerprint: str) -> None:
    """The least that a verified copy in two passes can cost in one thread."""
    for page, view in enumerate(target.views):
        here = ctypes.addressof(ctypes.c_char.from_buffer(view))
        ctypes.memmove(here, pool.page_address(page), target.page_bytes)
        if page_digest(view, layout=fingerprint, index=page, valid_rows=16, **EXTENT) != target.digests[page]:
            raise RuntimeError("a copy went wrong")


@contextmanager
def mapped(remote: Remote, page_kib: int) -> Iterator[MappedPool]:
    """The source's pool as shm maps it; the descriptor comes through the door like any reader's."""
    pools: list[MappedPool] = []

    def keep(fd: int, fingerprint: str, pool_id: int) -> MappedPool:
        pools.append(map_remote_pool(os.dup(fd), fingerprint, pool_id))
        return map_remote_pool(fd, fingerprint, pool_id)

    target, event = Target.make(page_kib, 1), threading.Event()
    with closing(ShmPageReader(reader_config(remote, page_kib, "shm"), keep)) as reader:
        reader.read(request(target, remote.facts["pool_id"], 0), lambda done: event.set())
        if not event.wait(WAIT_S):
            raise RuntimeError("the source's pool could not be mapped")
    yield pools[0]
    pools[0].close()


@contextmanager
def all_ways(remote: Remote, page_kib: int, target: Target) -> Iterator[list[Way]]:
    """All ways that this machine can go; closed at the end."""
    pool_id, fingerprint = remote.facts["pool_id"], layout(page_kib).fingerprint()
    with ExitStack() as stack:
        pool = stack.enter_context(mapped(remote, page_kib))
        config = partial(reader_config, remote, page_kib)
        enter = lambda reader: stack.enter_context(closing(reader))  # noqa: E731
        bare = enter(socket.create_connection((LOOPBACK, remote.facts["bare"])))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain = ShmPageReader(config("shm"), mover=copying_mover)
        tls = config("tls", tls=identity(remote.directory / "tls", "client"))
        readers: list[tuple[str, PageReader, bytes | None, tuple[str, ...]]] = [
            ("shm, no digest", enter(plain), NO_DIGEST, ("memcpy",)),
            ("shm", enter(transport("shm").reader(config("shm"))), None, ("memcpy", "memcpy + digest")),
            ("tcp, no digest", enter(TcpPageReader(config("tcp"), NoDigest)), NO_DIGEST, ("bare socket",)),
            ("tcp", enter(transport("tcp").reader(config("tcp"))), None, ("bare socket",)),
            ("tcp + TLS", enter(transport("tcp").reader(tls)), None, ("bare socket",)),
        ]
        calls: list[tuple[str, Callable[[], None], tuple[str, ...]]] = [
            ("memcpy", partial(copy_all, pool, target), ()),
            ("memcpy + digest", partial(copy_and_check, pool, target, fingerprint), ("memcpy",)),
            ("bare socket", partial(pull_bare, bare, target), ()),
        ]
        if "nixl" in remote.facts:
            hello = request(target, pool_id, 0)
            raw = stack.enter_context(raw_reads(config("nixl"), hello, target.views))
            calls.append(("NIXL itself", raw.pull, ("memcpy",)))
            reader = enter(transport("nixl").reader(config("nixl")))
            readers.append(("nixl", reader, None, ("NIXL itself", "memcpy")))
        for name, reader, digest, bases in readers:
            reads = [request(target, pool_id, page, digest=digest) for page in range(len(target.views))]
            calls.append((name, partial(pull, reader, reads), bases))
        yield [
            Way(name=name, pull=call, bases=bases, descriptor_bytes=target.page_bytes)
            for name, call, bases in calls
        ]


def digest_rates(target: Target, fingerprint: str) -> dict[str, Callable[[], None]]:
    """What a digest alone costs one thread: over one page that stays in the cache, and over all of them."""

    def digest(views: list[memoryview]) -> None:
        for page, view in enumerate(views):
            page_digest(view, layout=fingerprint, index=page, valid_rows=16, **EXTENT)

    warm = [target.views[0]] * len(target.views)
    return {
        "digest, page in cache": partial(digest, warm),
        "digest, all pages": partial(digest, target.views),
    }
