"""What the status page is told: looks at the router, a second apart, shared by all who watch.

What does not live here: the page and its routes (`status_page`), rates and quantiles (`pdserve.obs.rates`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pdserve.api import FleetStatus, WorkerStatus
from pdserve.errors import Overloaded
from pdserve.obs.catalogue.kinds import PAGE_STATES
from pdserve.obs.rates import History
from router.http.strict_json import dump
from router.hub import Hub

INTERVAL_S = 1.0
GAP_S = 3.0
"""Nobody looked for so long: what happened meanwhile is no rate of now."""
MAX_WATCHERS = 64
FIGURES = ("completion_tokens", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
"""The rates that are told over time; the others as they are now."""


class StatusFeed:
    """Looks at one router while somebody watches. Owned by one event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._watchers = 0
        self._history = History()
        self._looked_at = float("-inf")
        self._newest = b""

    @contextmanager
    def place(self) -> Iterator[None]:
        """A watcher's, from now on. Raises Overloaded if too many watch already."""
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded("Too many watch this router already; try again later.", retry_after_s=5.0)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    async def looks(self) -> AsyncGenerator[bytes, None]:
        """JSON objects, the first at once, then one a second until the router closes."""
        while not self._hub.closed.is_set():
            yield self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._hub.closed.wait()

    def _look(self) -> bytes:
        """Asks the hub once for all who want to know at about the same time."""
        now = asyncio.get_running_loop().time()
        since_s = now - self._looked_at
        if since_s >= INTERVAL_S * 0.9:
            if since_s > GAP_S:
                self._history = History()
            status = self._hub.status()
            self._history.push(status, now)
            self._newest, self._looked_at = dump(view(status, self._history)), now
        return self._newest


def view(status: FleetStatus, history: History) -> dict[str, Any]:
    """What the page shows: seconds, tokens by second, counts. No addresses, nothing of any request."""
    now = history.now
    return {
        "router": status.router_id,
        "state": "draining" if status.draining else "serving",
        "uptime_s": round(status.uptime_s, 1),
        "running": status.running,
        "queued": status.queued,
        "requests": now.requests,
        "failures": now.failures,
        "prompt_tokens": now.prompt_tokens,
        "cached_share": now.cached_share,
        "figures": {name: history.of(name) for name in FIGURES},
        "totals": {
            "finished": status.traffic.finished_requests,
            "failed": status.traffic.failed_requests,
            "prompt_tokens": status.traffic.prompt_tokens,
            "completion_tokens": status.traffic.completion_tokens,
        },
        "problems": list(status.pairing_problems),
        "workers": [_worker(worker) for worker in status.workers],
    }


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    load = worker.load
    return {
        "name": worker.record.peer.worker_id,
        "role": str(worker.record.role),
        "state": worker.state,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "waiting_tokens": load.waiting_tokens,
        "heartbeat_age_s": round(worker.heartbeat_age_s, 1),
        "pages": {state: getattr(load, f"{state}_pages") for state in PAGE_STATES},
        "page_bytes": worker.record.capability.page_bytes,
    }
