"""The decode worker's end of the data plane: one page reader per pool of a peer, into our own pools.

What lives here: readers and their completion. What does not: which pages to read (`decode_worker.loop`), what
a page of another layout becomes (`decode_worker.bridges`).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import replace

from decode_worker.bridges import Bridges
from decode_worker.loop import DecodeRole
from decode_worker.staging import Staging
from kvtransfer.effects import CancelRead, Effect, StartRead
from kvtransfer.plan.pairing import AS_THEY_ARE
from kvtransfer.port import WorkerPort, pick_transport
from kvtransfer.transport import PageReader, ReadDone, ReaderConfig, ReadRequest, ReadStatus, transport
from pdserve.clock import monotonic
from pdserve.kvcache.layout import rank_pool_id
from pdserve.obs.catalogue import worker as metrics
from pdserve.types import PeerRef

log = logging.getLogger(__name__)

ReaderName = tuple[str, int, int, int, str]
"""Worker, incarnation, pool, rank, layout where it is not ours: a peer may tell anything of each."""
MAX_READERS = 32
MAX_GONE = 1024


class Reads:
    """Carries out StartRead and CancelRead. Control thread, but for completions."""

    def __init__(self, port: WorkerPort, role: DecodeRole) -> None:
        self._port = port
        self._role = role
        self._bridges = Bridges(port.parts.pools, port.parts.context.layout)
        self._staging: dict[tuple[str, int], Staging] = {}
        self._slots: dict[int, tuple[Staging, memoryview]] = {}
        self._readers: dict[ReaderName, tuple[str, PageReader]] = {}
        self._pending: dict[int, tuple[PageReader, int]] = {}
        """By read: its reader, and the bytes it moves."""
        self._lock = threading.Lock()
        self._done: list[tuple[ReadDone, str]] = []
        self._gone: OrderedDict[tuple[str, int], None] = OrderedDict()
        for name in port.parts.transports:
            transport(name)  # what is missing for one shows at start, not in the first request
        port.on(StartRead, self._start)
        port.on(CancelRead, self._cancel)

    def stop(self) -> None:
        """Ends every read; no page is touched when it returns."""
        for _, reader in list(self._readers.values()):
            reader.close()

    def _start(self, effect: StartRead) -> None:
        for page in effect.blank:
            for pool in self._port.parts.pools:
                pool.zero(page)
        if effect.relay is not None:
            staging = self._staging.setdefault(_name(effect.peer), Staging())
            if staging.waiting or not self._take_slot(effect, staging):
                staging.waiting.append(effect)
                return
        self._read(effect)

    def _take_slot(self, effect: StartRead, staging: Staging) -> bool:
        assert effect.relay is not None
        layout = self._bridges.source_pages(effect.relay.layout, effect.rank)
        slot = staging.take(layout.page_bytes)
        if slot is not None:
            self._slots[effect.read_id] = staging, slot
        return slot is not None

    def _read(self, effect: StartRead) -> None:
        source = effect.source
        if effect.rank:
            source = replace(source, pool_id=rank_pool_id(source.pool_id, effect.rank))
        found = self._reader(effect, source.pool_id)
        if found is None:  # gone, out of reach, or no descriptor left for it
            self._ended(ReadDone(read_id=effect.read_id, status=ReadStatus.FAILED), "")
            return
        name, reader = found
        _, slot = self._slots.get(effect.read_id, (None, None))
        request = ReadRequest(
            read_id=effect.read_id,
            key=effect.key,
            ticket=effect.ticket,
            source=source,
            index=effect.index,
            valid_rows=effect.valid_rows,
            digest=effect.digest,
            target=self._own_page(effect) if slot is None else slot,
        )
        self._pending[effect.read_id] = reader, request.target.nbytes
        try:
            if slot is None:
                reader.read(request, lambda done: self._ended(done, name))
            else:
                reader.read(request, lambda done: self._ended(self._laid(done, effect, slot), name))
        except ValueError:  # what the peer announced costs its own request only
            log.exception("a page can not be read")
            self._ended(ReadDone(read_id=effect.read_id, status=ReadStatus.FAILED), name)

    def _own_page(self, effect: StartRead) -> memoryview:
        return self._port.parts.pools[effect.rank].page_view(effect.target_page)

    def _laid(self, done: ReadDone, effect: StartRead, slot: memoryview) -> ReadDone:
        """The reader's thread: a page of another layout is read when its rows are in our pages."""
        if done.status is not ReadStatus.GOOD:
            return done
        assert effect.relay is not None
        try:
            self._bridges.lay(effect.relay, effect.rank, slot)
        except Exception:  # else the read would never end, and its pages never be free
            log.exception("a page of another layout could not be re-laid")
            return replace(done, status=ReadStatus.FAILED, digest=b"", arrived_s=None, verified_s=None)
        return replace(done, verified_s=monotonic())

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
        _, num_bytes = self._pending.pop(done.read_id, (None, 0))
        if done.status is ReadStatus.GOOD:
            self._port.measure(metrics.TRANSFERRED_BYTES, num_bytes, (name,))
        staging, slot = self._slots.pop(done.read_id, (None, None))
        if staging is not None and slot is not None:
            staging.give(slot)
            self._read_waiting(staging)
            if staging.forgotten and not staging.busy:
                self._staging = {peer: one for peer, one in self._staging.items() if one is not staging}
        stamps = None
        if done.arrived_s is not None and done.verified_s is not None:
            stamps = (done.arrived_s, done.verified_s)
        return self._role.read_done(done.read_id, done.status, done.digest, name, now, stamps)

    def _read_waiting(self, staging: Staging) -> None:
        """A slot is free again."""
        while staging.waiting and self._take_slot(staging.waiting[0], staging):
            self._read(staging.waiting.popleft())

    def _cancel(self, effect: CancelRead) -> None:
        if effect.read_id in self._pending:
            reader, _ = self._pending[effect.read_id]
            reader.cancel(effect.read_id)
            return
        for staging in self._staging.values():
            for waiting in staging.waiting:
                if waiting.read_id == effect.read_id:
                    staging.waiting.remove(waiting)
                    done = ReadDone(read_id=effect.read_id, status=ReadStatus.FAILED, detail="cancelled")
                    self._ended(done, "")
                    return

    def _reader(self, effect: StartRead, pool_id: int) -> tuple[str, PageReader] | None:
        """The reader of a peer's pool, made at first use. None if no transport reaches it."""
        peer = effect.peer
        name = (*_name(peer), pool_id, effect.rank, effect.relay.layout if effect.relay is not None else "")
        if name in self._readers:
            return self._readers[name]
        parts = self._port.parts
        ours = parts.transports
        if effect.relay is not None:
            ours = tuple(way for way in ours if way not in AS_THEY_ARE)
        way = pick_transport(ours, parts.host_id, peer, rank=effect.rank, num_ranks=effect.num_ranks)
        if way is None or _name(peer) in self._gone:
            return None
        try:
            reader = transport(way[0]).reader(self._config(effect, pool_id, way[1]))
        except (OSError, RuntimeError) as error:
            log.warning("no page reader can be made: %s", type(error).__name__)
            return None
        self._make_room(peer)
        self._readers[name] = (way[0], reader)
        return self._readers[name]

    def _config(self, effect: StartRead, pool_id: int, endpoint: str) -> ReaderConfig:
        parts = self._port.parts
        pool = parts.pools[effect.rank] if effect.relay is None else None
        if effect.relay is not None:
            layout = self._bridges.source_pages(effect.relay.layout, effect.rank)
        else:
            layout = parts.pools[effect.rank].layout
        return ReaderConfig(
            endpoint=endpoint,
            pool_id=pool_id,
            layout=layout.fingerprint(),
            page_bytes=layout.page_bytes,
            layer_first=0,
            layer_last=layout.num_layers - 1,
            shard=effect.rank,
            tls=parts.tls,
            local=None if pool is None else pool.pages_view(),
        )

    def _make_room(self, peer: PeerRef) -> None:
        """A worker's earlier incarnations are gone, and their pools with them; idle readers make room.

        An announce that names a pool which this incarnation does not have costs itself only.
        """
        busy = {id(reader) for reader, _ in self._pending.values()}
        for name, (_, reader) in list(self._readers.items()):
            spare = len(self._readers) >= MAX_READERS and id(reader) not in busy
            earlier = name[0] == peer.worker_id and name[1] != peer.incarnation
            if earlier:
                self._gone[name[:2]] = None  # replaced: it must not take turns with its successor
            if earlier or spare:
                del self._readers[name]
                self._port.loop.run_in_executor(None, reader.close)
        for gone in [n for n in self._staging if n[0] == peer.worker_id and n != _name(peer)]:
            self._let_go(gone)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def forget(self, peer: PeerRef) -> None:
        """A peer is out of reach for good: its mapped pool is let go of."""
        for name in [n for n in self._readers if n[:2] == _name(peer)]:
            _, reader = self._readers.pop(name)
            self._port.loop.run_in_executor(None, reader.close)
        self._let_go(_name(peer))

    def _let_go(self, peer: tuple[str, int]) -> None:
        """Its memory goes too; with its last read if one still uses it."""
        if peer in self._staging:
            self._staging[peer].forgotten = True
            if not self._staging[peer].busy:
                del self._staging[peer]


def _name(peer: PeerRef) -> tuple[str, int]:
    return peer.worker_id, peer.incarnation
