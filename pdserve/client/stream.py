"""The blocking client's stream of one request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType

from pdserve.api import Chunk, GenerateInput
from pdserve.client.connect import Routers
from pdserve.client.result import Result
from pdserve.client.sending import Sending, StreamFacts
from pdserve.errors import Cancelled


class Stream(StreamFacts):
    """One request under way: iterate over its chunks, or call `result`. Leaving it unfinished cancels.

    Made by `Client.generate`. For one thread at a time, `cancel` aside.
    """

    def __init__(self, routers: Routers, source: GenerateInput) -> None:
        super().__init__(Sending(routers, source))
        self._stop = threading.Event()
        self._call = self._sending.open()
        self._events = self._read()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._events)

    def result(self) -> Result:
        """Waits for the end and gives the whole answer, whatever part of it was iterated over before."""
        for _ in self._events:
            pass
        return self._sending.collected.result()

    def cancel(self) -> None:
        """Ends the request, from any thread; iterating then raises Cancelled. No effect once it has ended."""
        self._stop.set()
        self._sending.cancel()

    def _read(self) -> Iterator[Chunk]:
        import grpc

        try:
            while True:
                try:
                    for message in self._call:
                        chunk = self._sending.take(message)
                        if chunk is not None:
                            yield chunk
                    return
                except grpc.RpcError as error:
                    wait_s = self._sending.after(error)
                if self._stop.wait(wait_s):
                    raise Cancelled("The request was cancelled.")
                self._call = self._sending.open()
        finally:
            self._sending.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
