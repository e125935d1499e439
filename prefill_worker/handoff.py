"""The prefill worker's end of the data plane: page servers on our pool, I/O pins, page digests.

What lives here: threads that read page bytes. What does not: who may have which page (`prefill_worker.loop`).
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.digest import page_digest
from kvtransfer.effects import ComputeDigest, Effect
from kvtransfer.port import Input, WorkerPort
from kvtransfer.transport import PageServer, PoolFacts, ServerConfig, transport
from kvtransfer.verdict import is_stale
from pdserve import failpoints
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.types import Key
from prefill_worker.digests import last_pages
from prefill_worker.loop import PrefillRole

_BATCH = 8
"""Pages digested between two words to the control thread: a turn of that costs as much as some digests."""


class Handoff:
    """Serves our pool's pages and digests them. `PageSource` for the page servers: any thread may call it."""

    def __init__(self, port: WorkerPort, role: PrefillRole) -> None:
        self._port = port
        self._role = role
        parts = port.parts
        self.facts = PoolFacts(
            pool_id=parts.pages.allocator.pool_id,
            layout=parts.layout.fingerprint(),
            num_pages=parts.pages.num_pages,
            page_bytes=parts.layout.page_bytes,
            stride_bytes=parts.layout.stride_bytes,
            fd=parts.pool.fd,
        )
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="digest")
        self._waiting: deque[ComputeDigest] = deque()
        self._digesting = False
        self._servers: dict[str, PageServer] = {}
        self._pinned: dict[str, int] = {}

    # -- control thread ---------------------------------------------------------------------------------

    def start(self) -> dict[str, str]:
        """Starts a page server for each transport; returns their endpoints by name."""
        parts = self._port.parts
        directory = os.path.join(parts.run_dir, f"{parts.context.incarnation:016x}")
        for name in parts.transports:
            config = ServerConfig(directory=directory, host=parts.host, tls=parts.tls)
            server = transport(name).server(self, config)
            server.start()
            self._servers[name] = server
        return {name: server.endpoint() for name, server in self._servers.items()}

    def stop(self) -> None:
        """Closes the page servers; no thread touches the pool when it returns."""
        for server in self._servers.values():
            server.close()
        self._digests.shutdown(wait=True)

    def digest(self, effect: ComputeDigest) -> None:
        """Handles ComputeDigest: off the control thread, answered by `digested`."""
        self._waiting.append(effect)
        if not self._digesting:
            self._digesting = True
            self._digests.submit(self._digest_all)

    def _digest_all(self) -> None:
        """Digests what waits and tells of it in parts, the rest of them while these are announced."""
        self._digesting = False  # first: what comes from here on asks for a turn of its own
        while batch := [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]:
            self._tell([(effect, self._digest(effect)) for effect in batch])

    def _tell(self, found: list[tuple[ComputeDigest, bytes]]) -> None:
        self._port.feed_soon(lambda now: self._digested(found, now))

    def _digested(self, found: list[tuple[ComputeDigest, bytes]], now: float) -> list[Effect]:
        return [
            effect
            for asked, value in found
            for effect in self._role.digested(asked.key, asked.index, asked.page, value, now)
        ]

    def _digest(self, effect: ComputeDigest) -> bytes:
        return self._digest_page(effect.page.page, effect.index, effect.valid_rows)

    def _digest_page(self, page: int, index: int, valid_rows: int) -> bytes:
        failpoints.stall("announce")
        parts = self._port.parts
        return page_digest(
            parts.pool.page_view(page),
            layout=self.facts.layout,
            layer_first=0,
            layer_last=parts.layout.num_layers - 1,
            shard=0,
            index=index,
            valid_rows=valid_rows,
        )

    # -- compute thread ---------------------------------------------------------------------------------

    def after_step(self, plan: StepPlan, result: StepResult) -> Input:
        """Digests what a prompt's last step wrote, where it was written: its request waits for nothing else
        any more, and a way to another thread and back takes longer than these few pages."""
        written = last_pages(plan, result, self._role.owns, self._port.parts.layout.page_size)
        found = [(page, index, self._digest_page(page, index, rows)) for page, index, rows in written]
        return lambda now: self._role.computed(found)

    # -- PageSource: any thread -------------------------------------------------------------------------

    def authorise(self, ticket: bytes, key: Key) -> bool:
        """Whether this ticket is the granted one of a live key."""
        now = self._port.loop.time()
        with self._port.lock:
            return self._role.authorise(ticket, key, now)

    def payload(self, page: int) -> memoryview:
        """The payload bytes of a page."""
        return self._port.parts.pool.page_view(page)

    def generation(self, page: int) -> int:
        """The page's generation as the mapped header has it."""
        return self._port.parts.pool.generation(page)

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
