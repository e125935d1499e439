"""A reader's control connection to a source: hello, the region to read, questions about generations.

What lives here: everything a reader says to the source over a socket, and noticing that the source is gone.
What does not: reads (`reader`), NIXL (`agent`).
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from types import TracebackType

from kvtransfer.hello import accept, introduce
from kvtransfer.listener import Signal, Stalled, wait_for
from kvtransfer.nixl.frames import Region, ask, number, split_endpoint
from kvtransfer.sockets import dialled
from kvtransfer.stream import FrameReceiver, FrameSender
from kvtransfer.transport import ReaderConfig, ReadRequest
from kvtransfer.wire import Frame, Kind, WireError


class Link:
    """One connection, from dial to `close`. For one thread. Every method raises PeerClosed, WireError,
    Stalled or OSError when the connection is of no more use; `Refused` comes from `greet` only."""

    def __init__(self, config: ReaderConfig, wake: Signal, closed: Callable[[], bool]) -> None:
        self._config, self._wake = config, wake
        host, port, self._published = split_endpoint(config.endpoint)
        self._sock = dialled(config, host, port, wake, closed)
        self._receiver = FrameReceiver(self._sock, expect=frozenset())
        self._sequence = 0

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def greet(self, request: ReadRequest) -> Region:
        """Says hello with that read's ticket; returns what may be read."""
        self._send(introduce(self._config, request))
        welcome = accept(self._receive(frozenset({Kind.WELCOME, Kind.REFUSED})), self._config)
        return Region.unpack(
            self._receive(frozenset({Kind.REGION})).body,
            published=self._published,
            num_pages=welcome.num_pages,
            page_bytes=welcome.page_bytes,
        )

    def generation(self, page: int) -> int:
        """The generation that the source gives the page now."""
        self._sequence += 1
        self._send(ask(page, self._sequence))
        frame = self._receive(frozenset({Kind.TELL}))
        if frame.sequence != self._sequence:
            raise WireError("an answer to another question")
        return number(frame)

    def listen(self) -> None:
        """From now on the host's next word ends `rest`; to be called before looking at what it said."""
        self._wake.clear()

    def rest(self) -> None:
        """Waits until the reader has something to do, or raises when the source leaves."""
        wait_for(self._sock, select.POLLIN, self._wake, math.inf)
        self.check()

    def check(self) -> None:
        """Raises when the source left or says something unasked."""
        self._receiver.expect = frozenset()
        if self._receiver.pump() is not None:
            raise WireError("an answer nobody asked for")

    def _receive(self, expect: frozenset[Kind]) -> Frame:
        self._receiver.expect = expect
        deadline = time.monotonic() + self._config.stall_s
        while (frame := self._receiver.pump()) is None:
            _wait(self._sock, select.POLLIN, deadline)
        return frame

    def _send(self, data: bytes) -> None:
        sender = FrameSender(self._sock)
        sender.load(data)
        deadline = time.monotonic() + self._config.stall_s
        while not sender.pump():
            _wait(self._sock, select.POLLOUT, deadline)


def _wait(sock: socket.socket, mask: int, deadline: float) -> None:
    # Short and bounded by the stall limit, so that `close` needs no way in here.
    poller = select.poll()
    poller.register(sock, mask)
    left_s = deadline - time.monotonic()
    if not poller.poll(max(0, math.ceil(left_s * 1000))):
        raise Stalled
