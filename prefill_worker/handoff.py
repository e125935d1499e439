"""The prefill worker's end of the data plane: page servers on the pools of all ranks, page digests.

What lives here: threads that read page bytes. What does not: one rank's pool as its server sees it
(`prefill_worker.sources`), who may have which page (`prefill_worker.loop`).
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.effects import ComputeDigest, Effect
from kvtransfer.port import BETWEEN_RANKS, Input, WorkerPort
from kvtransfer.transport import PageServer, ServerConfig, transport
from pdserve import failpoints
from pdserve.sched.plan import StepPlan, StepResult
from prefill_worker.digests import last_pages
from prefill_worker.loop import PrefillRole
from prefill_worker.sources import Guard, RankSource

_BATCH = 8
"""Pages digested between two words to the control thread: a turn of that costs as much as some digests."""


class Handoff:
    """Serves the pages of our pools and digests them."""

    def __init__(self, port: WorkerPort, role: PrefillRole) -> None:
        self._port = port
        self._role = role
        parts = port.parts
        guard = Guard(port, role)
        self._sources = [RankSource(rank, pool, guard) for rank, pool in enumerate(parts.pools)]
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="digest")
        self._waiting: deque[ComputeDigest] = deque()
        self._digesting = False
        self._servers: dict[str, list[PageServer]] = {}

    # -- control thread ---------------------------------------------------------------------------------

    def start(self) -> dict[str, str]:
        """Starts a page server for each transport and rank; returns their endpoints by name, in order of
        rank."""
        parts = self._port.parts
        directory = os.path.join(parts.run_dir, f"{parts.context.incarnation:016x}")
        for name in parts.transports:
            config = ServerConfig(directory=directory, host=parts.host, tls=parts.tls)
            for source in self._sources:
                server = transport(name).server(source, config)
                server.start()
                self._servers.setdefault(name, []).append(server)
        return {
            name: BETWEEN_RANKS.join(server.endpoint() for server in servers)
            for name, servers in self._servers.items()
        }

    def stop(self) -> None:
        """Closes the page servers; no thread touches the pool when it returns."""
        for server in itertools.chain.from_iterable(self._servers.values()):
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
        """16 bytes for each rank's part, in order."""
        failpoints.stall("announce")
        return b"".join(source.digest(page, index, valid_rows) for source in self._sources)

    # -- compute thread ---------------------------------------------------------------------------------

    def after_step(self, plan: StepPlan, result: StepResult) -> Input:
        """Digests what a prompt's last step wrote, where it was written: its request waits for nothing else
        any more, and a way to another thread and back takes longer than these few pages."""
        written = last_pages(plan, result, self._role.owns, self._port.parts.layout.page_size)
        found = [(page, index, self._digest_page(page, index, rows)) for page, index, rows in written]
        return lambda now: self._role.computed(found)
