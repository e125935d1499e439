"""What waits to be sent on a stream: taken out many at once, so that one message of the stream carries them.

What lives here: the queue between whoever has something to say and the generator that a gRPC stream pulls
from. What does not: what is sent, and what to do about what does not fit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_WAITING = 16384
MAX_BATCH = 64


class Outbox(Generic[T]):
    """A bounded queue of one loop, with one taker."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, item: T) -> bool:
        """Queues an item; False if there is no room for it."""
        if self._closed or len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(item)
        self._wake.set()
        return True

    def close(self) -> None:
        """The stream is over: `take` returns nothing from now on."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[T]:
        """Waits until something is there; all that is by then, in order, at most MAX_BATCH. Empty: closed."""
        while not self._waiting and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        if self._closed:
            return []
        return [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
