"""The destination end of the shm transport: maps the peer's pool once and copies pages out of it.

What lives here: getting the descriptor, and the mover thread, which takes reads in batches. What does not:
page states and pins (the host's), the mapping itself (`pdserve.kvcache.pool.RemotePool`), the copy with its
looks at the generation (`kvtransfer.mover`).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from kvtransfer.hello import Refused, accept, digest_header, introduce
from kvtransfer.listener import Signal, Stalled, wait_for
from kvtransfer.mover import Copied, Copy, PageMover
from kvtransfer.reads import Counters, Pending, ReadTable
from kvtransfer.shm.server import same_user
from kvtransfer.stream import PeerClosed
from kvtransfer.transport import Done, ReaderConfig, ReadRequest, ReadStatus
from kvtransfer.wire import HEADER, Kind, WireError, unpack, unpack_whole
from pdserve.errors import Incompatible

log = logging.getLogger(__name__)
_ANSWERS = frozenset({Kind.WELCOME, Kind.REFUSED})
_MAX_ANSWER_BYTES = 4096
_BATCH_BYTES = 8 << 20  # about 0.7 ms: how long a closed reader may still be busy
_MAX_BATCH = 64


class MappedPool(Protocol):
    """A peer's pool as this reader sees it."""

    @property
    def num_pages(self) -> int: ...

    def page_address(self, page: int) -> int: ...

    def generation_address(self, page: int) -> int: ...

    def close(self) -> None: ...


MapPool = Callable[[int, str, int], MappedPool]
"""Maps a descriptor, given the layout's fingerprint and the pool id. Raises Incompatible."""


def map_remote_pool(fd: int, layout: str, pool_id: int) -> MappedPool:
    """The way it is done outside tests. Imports torch on first use."""
    from pdserve.kvcache.pool import RemotePool

    return RemotePool.map(fd, layout, pool_id)


class ShmPageReader:
    """A `PageReader` that copies out of the mapped pool of a peer on this machine."""

    def __init__(
        self,
        config: ReaderConfig,
        map_pool: MapPool = map_remote_pool,
        mover: Callable[..., PageMover] = PageMover,
    ) -> None:
        """mover: makes the `PageMover`; takes its arguments."""
        self._config, self._map_pool = config, map_pool
        self._batch = max(1, min(_MAX_BATCH, _BATCH_BYTES // config.page_bytes))
        header = digest_header(config)
        self._mover = mover(page_bytes=config.page_bytes, capacity=self._batch, header=header)
        self._counters, self._stop = Counters(), Signal()
        self._reads = ReadTable(config, self._counters)
        self._pool: MappedPool | None = None
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="kv-copy", daemon=True)
        self._thread.start()

    def read(self, request: ReadRequest, done: Done) -> None:
        """See PageReader."""
        self._reads.add(request, done)

    def cancel(self, read_id: int) -> None:
        """See PageReader."""
        self._reads.cancel(read_id)

    def counters(self) -> Mapping[str, int]:
        """See PageReader."""
        return self._counters.snapshot()

    def close(self) -> None:
        """See PageReader. May be called more than once, and from a `done`."""
        self._reads.close()
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (pending := self._reads.wait_and_ask()) is not None:
            self._serve(pending)
        self._reads.end_all("closed")
        self._detach()
        self._stop.close()

    def _serve(self, pending: Pending) -> None:
        try:
            pool = self._attached(pending)
            begun = [pending] if self._reads.begin(pending) else []
            self._move(begun + self._reads.begin_more(self._batch - len(begun)), pool)
            return
        except Refused as refused:
            self._detach()
            self._reads.end(pending, ReadStatus.FAILED, detail=str(refused))
            return
        except Stalled:
            detail = "stalled"
        except (WireError, Incompatible):
            detail = "protocol violation"
        except (PeerClosed, OSError):
            detail = "peer lost"
        except Exception:
            log.exception("a page read failed")
            detail = "internal error"
        self._detach()
        self._counters.add(detail)
        self._reads.end_all("closed" if self._reads.closed else detail)

    def _move(self, batch: list[Pending], pool: MappedPool) -> None:
        """Copies and ends a batch; a reader that is closed meanwhile leaves what is not copied."""
        moving, copies = [], []
        for pending in batch:
            source = pending.request.source
            if source.page >= pool.num_pages:
                self._reads.end(pending, ReadStatus.FAILED, detail="no such page")
            else:
                moving.append(pending)
                copies.append(_copy(pending.request, pool))
        self._mover.load(copies)
        at = 0
        while self._mover.busy and not self._reads.closed:
            copied = self._mover.move(_BATCH_BYTES)
            self._end(moving[at : at + len(copied)], copied)
            at += len(copied)

    def _end(self, ended: list[Pending], copied: list[Copied]) -> None:
        arrived = []
        for pending, result in zip(ended, copied, strict=True):
            if result.stale:
                self._reads.end(pending, ReadStatus.STALE)
            else:
                arrived.append((pending, result.digest))
        self._reads.verify_all(arrived)

    def _attached(self, pending: Pending) -> MappedPool:
        """The mapped pool of a peer that lives. Raises what `_serve` sorts."""
        if self._pool is not None and self._sock is not None:
            if _left(self._sock):
                raise PeerClosed
            return self._pool
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(self._config.stall_s)
        self._sock.connect(self._config.endpoint)
        if not same_user(self._sock):
            raise WireError("the source runs as another user")
        self._sock.sendall(introduce(self._config, pending.request))
        fd = self._take_descriptor(self._sock)
        try:
            self._pool = self._map_pool(fd, self._config.layout, self._config.pool_id)
        finally:
            os.close(fd)
        self._counters.add("connections")
        return self._pool

    def _take_descriptor(self, sock: socket.socket) -> int:
        data, fds = b"", []
        deadline = time.monotonic() + self._config.stall_s
        try:
            while not _is_whole(data):
                wait_for(sock, select.POLLIN, self._stop, deadline)
                if self._stop.is_set():
                    raise PeerClosed
                more, found, _, _ = socket.recv_fds(sock, _MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                fds += found
                if not more:
                    raise PeerClosed
                data += more
            accept(unpack_whole(data, _ANSWERS), self._config)
            if len(fds) != 1:
                raise WireError("a welcome without a descriptor")
            return fds.pop()
        finally:
            for fd in fds:
                os.close(fd)

    def _detach(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _copy(request: ReadRequest, pool: MappedPool) -> Copy:
    source = request.source
    return Copy(
        pool.page_address(source.page),
        request.target,
        pool.generation_address(source.page),
        source.generation,
        request.index,
        request.valid_rows,
    )


def _is_whole(data: bytes) -> bool:
    """Whether the answer's frame is there. Raises WireError for what is none."""
    if len(data) < HEADER.size:
        return False
    _, body_bytes, _ = unpack(data[: HEADER.size], _ANSWERS, 0)
    return len(data) >= HEADER.size + body_bytes


def _left(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
