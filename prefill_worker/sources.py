"""A rank's pool as its page servers see it, and the pins that all ranks share.

What lives here: what a page server may ask of its host. What does not: servers and digest threads
(`prefill_worker.handoff`), who may have which page (`prefill_worker.loop`).
"""

from __future__ import annotations

from kvtransfer.digest import page_digest
from kvtransfer.effects import Effect
from kvtransfer.port import WorkerPort
from kvtransfer.transport import PoolFacts
from kvtransfer.verdict import is_stale
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.pool import KVPool
from pdserve.types import Key
from prefill_worker.loop import PrefillRole


class Guard:
    """Tickets and I/O pins. Any thread may call it. A page id means that page of every rank."""

    def __init__(self, port: WorkerPort, role: PrefillRole) -> None:
        self._port, self._role = port, role
        self._pinned: dict[str, int] = {}

    def authorise(self, ticket: bytes, key: Key) -> bool:
        """Whether this ticket is the granted one of a live key."""
        now = self._port.loop.time()
        with self._port.lock:
            return self._role.authorise(ticket, key, now)

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        """Holds a page of that generation that this key's transfer holds; one step under the core's lock."""
        pages = self._port.parts.pages
        transfer = Holder(HolderKind.TRANSFER, str(key))
        with self._port.lock:
            if is_stale(pages.generation(page), generation) or transfer not in pages.holders(page):
                return False
            pages.hold(page, Holder(HolderKind.IO, pin_id))
            self._pinned[pin_id] = page
        return True

    def unpin(self, pin_id: str) -> None:
        """Drops a pin, on the control thread, so that waiting work is planned with the page."""
        self._port.feed_soon(lambda now: self._unpin(pin_id))

    def _unpin(self, pin_id: str) -> list[Effect]:
        page = self._pinned.pop(pin_id, None)
        if page is not None:
            self._port.parts.pages.drop(page, Holder(HolderKind.IO, pin_id))
        return []


class RankSource:
    """`PageSource` of one rank: any thread may call it."""

    def __init__(self, rank: int, pool: KVPool, guard: Guard) -> None:
        self._rank, self._pool, self._guard = rank, pool, guard
        self.facts = PoolFacts(
            pool_id=pool.pool_id,
            layout=pool.layout.fingerprint(),
            num_pages=pool.num_pages,
            page_bytes=pool.layout.page_bytes,
            stride_bytes=pool.layout.stride_bytes,
            fd=pool.fd,
        )

    def digest(self, page: int, index: int, valid_rows: int) -> bytes:
        """16 bytes over this rank's part of a page, as page `index` of a prompt."""
        return page_digest(
            self._pool.page_view(page),
            layout=self.facts.layout,
            layer_first=0,
            layer_last=self._pool.layout.num_layers - 1,
            shard=self._rank,
            index=index,
            valid_rows=valid_rows,
        )

    def authorise(self, ticket: bytes, key: Key) -> bool:
        """See PageSource."""
        return self._guard.authorise(ticket, key)

    def payload(self, page: int) -> memoryview:
        """See PageSource."""
        return self._pool.page_view(page)

    def generation(self, page: int) -> int:
        """See PageSource; as the mapped header has it."""
        return self._pool.generation(page)

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        """See PageSource."""
        return self._guard.pin(page, generation, key, pin_id)

    def unpin(self, pin_id: str) -> None:
        """See PageSource."""
        self._guard.unpin(pin_id)
