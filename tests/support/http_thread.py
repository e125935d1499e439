"""A router with its HTTP API in a thread of its own, for tests that are not asynchronous (hypothesis).

What does not live here: what is sent, and what is expected.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.support.http_kit import Served, served


@contextmanager
def serving(ends_at: int, **config: Any) -> Iterator[tuple[httpx2.Client, Served]]:
    """A client, and what it talks to; completions end after so many tokens."""
    up: list[Served] = []
    begun, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with served(**config) as api:
            api.worker.ends_at = ends_at
            up.append(api)
            begun.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert begun.wait(30)
        with httpx2.Client(base_url=up[0].url, timeout=30) as client:
            yield client, up[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
        loop.close()
