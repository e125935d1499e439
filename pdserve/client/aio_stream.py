"""The asyncio client's stream of one request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType

from pdserve.api import Chunk, GenerateInput
from pdserve.client.connect import Routers
from pdserve.client.result import Result
from pdserve.client.sending import Sending, StreamFacts
from pdserve.errors import Cancelled


class AsyncStream(StreamFacts):
    """One request under way: iterate over its chunks, or await `result`. Leaving it unfinished cancels.

    Made by `AsyncClient.generate`.
    """

    def __init__(self, routers: Routers, source: GenerateInput) -> None:
        import asyncio

        super().__init__(Sending(routers, source))
        self._stop = asyncio.Event()
        self._call = self._sending.open()
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._events)

    async def result(self) -> Result:
        """Waits for the end and gives the whole answer, whatever part of it was iterated over before."""
        async for _ in self._events:
            pass
        return self._sending.collected.result()

    def cancel(self) -> None:
        """Ends the request; iterating then raises Cancelled. No effect once it has ended."""
        self._stop.set()
        self._sending.cancel()

    async def _read(self) -> AsyncIterator[Chunk]:
        import asyncio

        import grpc

        try:
            while True:
                try:
                    async for message in self._call:
                        chunk = self._sending.take(message)
                        if chunk is not None:
                            yield chunk
                    return
                except grpc.RpcError as error:
                    wait_s = self._sending.after(error)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    raise Cancelled("The request was cancelled.") from None
                await self._pause(wait_s)
                self._call = self._sending.open()
        finally:
            self._sending.cancel()

    async def _pause(self, wait_s: float) -> None:
        import asyncio

        try:
            await asyncio.wait_for(self._stop.wait(), wait_s)
        except TimeoutError:
            return
        raise Cancelled("The request was cancelled.")

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
