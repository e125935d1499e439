"""For tests of programs that use this SDK: a server in this process, over real gRPC on loopback, that answers
what it is told to and remembers what it was asked.

    with FakeServer() as server, Client(server.address) as client:
        server.answer("four")
        assert client.generate("two and two").result().text == "four"
        assert server.requests[0].prompt == "two and two"

What lives here: the server and its script. What does not: answers (`fakes`) and the wire (`fake_service`).
There is no model: token ids are the bytes of texts. Needs grpcio and protobuf only, as the SDK does.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from pdserve.api import Chunk, Explanation, GenerateInput, StreamEvent
from pdserve.client import fakes
from pdserve.client.fake_service import add_to_server
from pdserve.client.fakes import FakeAnswer, Script
from pdserve.errors import Cancelled, PdserveError, UnknownRequest
from pdserve.messages import Outcome
from pdserve.rpc.convert.generate import generate_from_pb

__all__ = ["FakeAnswer", "FakeServer", "Recorded", "Script"]

WAIT_S = 10.0


@dataclass(slots=True)
class _Live:
    """A stream. done: all of it was sent. gone: its call is over. aborted: by another call."""

    done: bool = False
    gone: bool = False
    aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One call that came. request: GenerateInput of Generate, else the message. deadline_s: left to it."""

    method: str
    request: Any
    metadata: dict[str, str]
    deadline_s: float


class FakeServer:
    """A scripted server on 127.0.0.1. Use it as a context manager, or `start` and `stop` it.

    calls: all that came, in order; requests: those of Generate.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        credentials: grpc.ServerCredentials | None = None,
        max_calls: int = 64,
    ) -> None:
        """credentials: to listen with TLS. max_calls: answered at one time."""
        self.model, self.address = model, ""
        self.calls: list[Recorded] = []
        self.default: FakeAnswer | str = "hello"
        self._credentials, self._max_calls = credentials, max_calls
        self._answers: deque[Script] = deque()
        self._failures: defaultdict[str, deque[PdserveError]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._held = False
        self._numbers = itertools.count(1)
        self._live: dict[str, _Live] = {}
        self._num_left = 0
        self._server: grpc.Server | None = None

    # -- the script ------------------------------------------------------------------------------------

    def answer(self, *answers: Script) -> None:
        """The answers of the next requests, in order: texts, FakeAnswers, or functions of the request that
        give events. Later requests get `default`."""
        self._answers += answers

    def fail(self, error: PdserveError, times: int = 1, *, method: str = "Generate") -> None:
        """The next calls of a method are refused with an error, before they are admitted."""
        self._failures[method].extend([error] * times)

    def hold(self) -> None:
        """Streams stop before their next chunk, and questions before their answer, until `release` or until
        their client has gone. abort and explain are answered."""
        self._held = True

    def release(self) -> None:
        """Held streams go on."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    # -- what came -------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[GenerateInput]:
        """All requests for a generation, those refused included."""
        return [call.request for call in tuple(self.calls) if call.method == "Generate"]

    def wait_for_calls(self, number: int, timeout_s: float = WAIT_S) -> None:
        """Returns when so many calls have come in all. Raises TimeoutError."""
        self._wait(lambda: len(self.calls) >= number, timeout_s)

    def wait_for_cancelled(self, number: int = 1, timeout_s: float = WAIT_S) -> None:
        """Returns when so many streams were left by their client in all. Raises TimeoutError."""
        self._wait(lambda: self._num_left >= number, timeout_s)

    def _wait(self, reached: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise TimeoutError("what the test waits for did not happen")

    # -- running ---------------------------------------------------------------------------------------

    def start(self, port: int = 0) -> None:
        """Listens on a port of the system's choice, or on this one."""
        self._server = server = grpc.server(
            ThreadPoolExecutor(self._max_calls, thread_name_prefix="fake-server"),
            options=[("grpc.so_reuseport", 0)],
        )
        add_to_server(self, server)
        target = f"127.0.0.1:{port}"
        if self._credentials is None:
            bound = server.add_insecure_port(target)
        else:
            bound = server.add_secure_port(target, self._credentials)
        self.address = f"127.0.0.1:{bound}"
        server.start()

    def stop(self) -> None:
        """Breaks all calls, as a process that dies does. It may be started again."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self.stop()

    # -- for the servicer ------------------------------------------------------------------------------

    def on_came(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        """Remembers a call, and refuses it if it is to fail."""
        call = Recorded(
            method=method,
            request=generate_from_pb(request) if method == "Generate" else request,
            metadata={str(key): str(value) for key, value in context.invocation_metadata()},
            deadline_s=context.time_remaining() or 0.0,
        )
        with self._changed:
            self.calls.append(call)
            failures = self._failures[method]
            error = failures.popleft() if failures else None
            self._changed.notify_all()
        if error is not None:
            raise error
        if method not in ("Generate", "Abort", "Explain"):
            live = _Live(done=True)
            context.add_callback(lambda: self._over(live))
            self._wait_for_release(live)

    def on_generate(self, source: GenerateInput, context: grpc.ServicerContext) -> Iterator[StreamEvent]:
        with self._changed:
            script = self._answers.popleft() if self._answers else self.default
            request_id = f"{self.model}-{next(self._numbers)}"
            live = self._live[request_id] = _Live()
        context.add_callback(lambda: self._over(live))
        try:
            for event in fakes.events(script, source, request_id):
                if isinstance(event, Chunk):
                    self._wait_for_release(live)
                if live.aborted:
                    raise Cancelled("The request was aborted.")
                if live.gone:
                    return
                yield event
        finally:
            live.done = not live.gone

    def _wait_for_release(self, live: _Live) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or live.gone or live.aborted)

    def _over(self, live: _Live) -> None:
        with self._changed:
            live.gone = True
            self._num_left += not live.done
            self._changed.notify_all()

    def on_abort(self, request_id: str) -> Outcome:
        with self._changed:
            live = self._live.get(request_id)
            if live is None:
                return Outcome.UNKNOWN
            if live.done or live.gone:
                return Outcome.COMPLETE
            live.aborted = True
            self._changed.notify_all()
            return Outcome.STOPPING

    def on_explain(self, request_id: str) -> Explanation:
        live = self._live.get(request_id)
        if live is None:
            raise UnknownRequest("request_id: this server knows no such request.")
        return Explanation(request_id=request_id, state="done" if live.done else "running")
