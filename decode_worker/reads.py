"""The decode worker's end of the data plane: one page reader per prefill worker, into our own pool.

What lives here: readers and their completion. What does not: which pages to read (`decode_worker.loop`).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from decode_worker.loop import DecodeRole
from kvtransfer.effects import CancelRead, Effect, StartRead
from kvtransfer.port import WorkerPort, pick_transport
from kvtransfer.transport import PageReader, ReadDone, ReaderConfig, ReadRequest, ReadStatus, transport
from pdserve.types import PeerRef

log = logging.getLogger(__name__)

MAX_READERS = 32
MAX_GONE = 1024


class Reads:
    """Carries out StartRead and CancelRead. Control thread, but for completions."""

    def __init__(self, port: WorkerPort, role: DecodeRole) -> None:
        self._port = port
        self._role = role
        self._readers: dict[tuple[str, int, int], tuple[str, PageReader]] = {}
        self._pending: dict[int, PageReader] = {}
        self._lock = threading.Lock()
        self._done: list[tuple[ReadDone, str]] = []
        self._gone: OrderedDict[tuple[str, int], None] = OrderedDict()
        for name in port.parts.transports:
            transport(name)  # what is missing for one shows at start, not in the first request
        port.on(StartRead, self._start)
        port.on(CancelRead, self._cancel)

    def stop(self) -> None:
        """Ends every read; no page is touched when it returns."""
        for _, reader in self._readers.values():
            reader.close()

    def _start(self, effect: StartRead) -> None:
        found = self._reader(effect.peer, effect.source.pool_id)
        if found is None:  # gone, out of reach, or no descriptor left for it
            self._ended(ReadDone(read_id=effect.read_id, status=ReadStatus.FAILED), "")
            return
        name, reader = found
        self._pending[effect.read_id] = reader
        request = ReadRequest(
            read_id=effect.read_id,
            key=effect.key,
            ticket=effect.ticket,
            source=effect.source,
            index=effect.index,
            valid_rows=effect.valid_rows,
            digest=effect.digest,
            target=self._port.parts.pool.page_view(effect.target_page),
        )
        reader.read(request, lambda done: self._ended(done, name))

    def _ended(self, done: ReadDone, name: str) -> None:
        """Any thread. What ends until the control thread gets to it is one input."""
        with self._lock:
            is_first = not self._done
            self._done.append((done, name))
        if is_first:
            self._port.feed_soon(self._finish_all)

    def _finish_all(self, now: float) -> list[Effect]:
        with self._lock:
            ended, self._done = self._done, []
        return [effect for done, name in ended for effect in self._finish(done, name, now)]

    def _finish(self, done: ReadDone, name: str, now: float) -> list[Effect]:
        self._pending.pop(done.read_id, None)
        stamps = None
        if done.arrived_s is not None and done.verified_s is not None:
            stamps = (done.arrived_s, done.verified_s)
        return self._role.read_done(done.read_id, done.status, done.digest, name, now, stamps)

    def _cancel(self, effect: CancelRead) -> None:
        reader = self._pending.get(effect.read_id)
        if reader is not None:
            reader.cancel(effect.read_id)

    def _reader(self, peer: PeerRef, pool_id: int) -> tuple[str, PageReader] | None:
        """The reader of a peer's pool, made at first use. None if no transport reaches it."""
        name = (peer.worker_id, peer.incarnation, pool_id)
        if name in self._readers:
            return self._readers[name]
        parts = self._port.parts
        way = pick_transport(parts.transports, parts.host_id, peer)
        if way is None or (peer.worker_id, peer.incarnation) in self._gone:
            return None
        config = ReaderConfig(
            endpoint=way[1],
            pool_id=pool_id,
            layout=parts.layout.fingerprint(),
            page_bytes=parts.layout.page_bytes,
            layer_first=0,
            layer_last=parts.layout.num_layers - 1,
            tls=parts.tls,
            local=parts.pool.pages_view(),
        )
        try:
            reader = transport(way[0]).reader(config)
        except (OSError, RuntimeError) as error:
            log.warning("no page reader can be made: %s", type(error).__name__)
            return None
        self._make_room(peer)
        self._readers[name] = (way[0], reader)
        return self._readers[name]

    def _make_room(self, peer: PeerRef) -> None:
        """A worker's earlier incarnations are gone, and their pools with them; idle readers make room.

        An announce that names a pool which this incarnation does not have costs itself only.
        """
        busy = {id(reader) for reader in self._pending.values()}
        for name, (_, reader) in list(self._readers.items()):
            spare = len(self._readers) >= MAX_READERS and id(reader) not in busy
            earlier = name[0] == peer.worker_id and name[1] != peer.incarnation
            if earlier:
                self._gone[name[:2]] = None  # replaced: it must not take turns with its successor
            if earlier or spare:
                del self._readers[name]
                self._port.loop.run_in_executor(None, reader.close)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def forget(self, peer: PeerRef) -> None:
        """A peer is out of reach for good: its mapped pool is let go of."""
        for name in [n for n in self._readers if n[:2] == (peer.worker_id, peer.incarnation)]:
            _, reader = self._readers.pop(name)
            self._port.loop.run_in_executor(None, reader.close)
