"""Re-laying pages of other layouts into our own, on whichever thread has read them.

What lives here: the executor of each source layout, and which addresses a page's rows go to. What does not:
the plan and its proof (`kvtransfer.plan`), reads and slots (`decode_worker.reads`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.effects import Relay
from kvtransfer.plan import bridge_plan
from kvtransfer.relay import NativeRelayout
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool

MAX_LAYOUTS = 64


@dataclass(slots=True)
class _Executor:
    """Of one source layout; proven at its first use, by whoever has the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    relayout: NativeRelayout | None = None


class Bridges:
    """Executors by source layout. Any thread may use it; one re-layout of a layout runs at a time, and the
    proof before the first keeps no other layout waiting."""

    def __init__(self, pools: Sequence[KVPool], own: str) -> None:
        """pools: of our ranks. own: our layout as text."""
        self._pools, self._own = tuple(pools), own
        self._lock = threading.Lock()
        self._made: dict[str, _Executor] = {}

    def source_pages(self, layout: str, rank: int) -> PageLayout:
        """What pages of a source's rank are. Raises Incompatible."""
        return bridge_plan(layout, self._own).source.rank_pages(rank)

    def lay(self, relay: Relay, rank: int, slot: memoryview) -> None:
        """Writes one part of a page, verified and in `slot`, into our pages, whose holder keeps them pinned.
        Raises PdserveError where there is no such plan."""
        executor = self._executor(relay.layout)
        targets = {
            (ours, place): pool.page_address(page)
            for ours, pool in enumerate(self._pools)
            for place, page in relay.targets
        }
        with executor.lock:
            if executor.relayout is None:
                executor.relayout = NativeRelayout(bridge_plan(relay.layout, self._own))
            executor.relayout.execute(
                source_pages={(rank, relay.span_page): slot},
                target_pages=targets,
                num_tokens=relay.num_tokens,
                held=relay.held,
            )

    def _executor(self, layout: str) -> _Executor:
        with self._lock:
            if layout not in self._made and len(self._made) >= MAX_LAYOUTS:  # peers come and go
                self._made.clear()
            return self._made.setdefault(layout, _Executor())
