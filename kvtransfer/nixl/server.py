"""The source end of the nixl transport: registers the pool and tells readers, after their hello, how to
read it.

What lives here: the agent of a pool, the listener behind which its address lies, answers about generations.
What does not: page bytes, which readers fetch by themselves, and pins: a page may go while it is read, and
the reader's digest shows that (protocol.md §1).

A reader that has passed the hello is trusted with the whole registered pool, and NIXL registers no memory for
reading only: tickets guard the door here, and the announces of pages.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Mapping

from kvtransfer.hello import judge
from kvtransfer.listener import Listener, Signal, wait_for
from kvtransfer.nixl.agent import Agent, address_of
from kvtransfer.nixl.frames import HOST_MEMORY, Region, endpoint, number, tell
from kvtransfer.reads import Counters
from kvtransfer.sockets import accepting, address, bound
from kvtransfer.stream import FrameReceiver, FrameSender
from kvtransfer.transport import PageSource, ServerConfig
from kvtransfer.wire import Code, Frame, Hello, Kind, WireError


class NixlPageServer:
    """A `PageServer` whose pages are read one-sidedly."""

    def __init__(self, source: PageSource, config: ServerConfig) -> None:
        self._source, self._config = source, config
        self._counters, self._stop = Counters(), Signal()
        self._listener: Listener | None = None
        self._agent: Agent | None = None
        self._region = b""
        self._endpoint = ""

    def start(self) -> None:
        """Registers the pool, binds and accepts. Raises ConfigError, NixlError or OSError."""
        self._agent = Agent(agent_name(self._source.facts.pool_id), self._config.host, is_source=True)
        try:
            self._region = _register(self._agent, self._source)
            sock = bound(self._config.host, self._config.port)
        except BaseException:
            self._agent.close()
            raise
        self._endpoint = endpoint(address(sock), self._region)
        self._listener = Listener(
            sock,
            serve=self._serve,
            stop=self._stop,
            max_connections=self._config.max_connections,
            counters=self._counters,
            secure=accepting(self._config, self._stop),
        )
        self._listener.start()

    def endpoint(self) -> str:
        """host:port of the control connection and the fingerprint of what it will tell."""
        return self._endpoint

    def counters(self) -> Mapping[str, int]:
        """See PageServer. Pages are not counted: nobody here notices a read."""
        return self._counters.snapshot()

    def close(self) -> None:
        """See PageServer. What readers have under way fails, or brings bytes that they will not believe."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._stop.close()
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receiver = FrameReceiver(sock, expect=frozenset({Kind.HELLO}))
        frame = self._next(sock, receiver, time.monotonic() + self._config.stall_s)
        if frame is None or not self._greet(sock, Hello.unpack(frame.body)):
            return
        receiver.expect = frozenset({Kind.ASK})
        while (frame := self._next(sock, receiver, math.inf)) is not None:
            self._answer(sock, frame)

    def _greet(self, sock: socket.socket, hello: Hello) -> bool:
        code, answer = judge(hello, self._source)
        good = code is Code.NONE
        self._counters.add("mapped" if good else "refused")
        self._send(sock, answer + self._region if good else answer)
        return good

    def _answer(self, sock: socket.socket, frame: Frame) -> None:
        page = number(frame)
        if page >= self._source.facts.num_pages:
            raise WireError("a question about no page of ours")
        self._counters.add("asked")
        self._send(sock, tell(self._source.generation(page), frame.sequence))

    def _next(self, sock: socket.socket, receiver: FrameReceiver, deadline: float) -> Frame | None:
        """The next frame, begun before `deadline`; None when the server stops."""
        while (frame := receiver.pump()) is None:
            begun = receiver.begun_at
            end = deadline if begun is None else min(deadline, begun + self._config.stall_s)
            wait_for(sock, select.POLLIN, self._stop, end)
            if self._stop.is_set():
                return None
        return frame

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sender = FrameSender(sock)
        sender.load(data)
        deadline = time.monotonic() + self._config.stall_s
        while not sender.pump() and not self._stop.is_set():
            wait_for(sock, select.POLLOUT, self._stop, deadline)


def agent_name(pool_id: int) -> str:
    """What the agent of a pool is called, on both sides."""
    return f"pdserve-{pool_id:016x}"


def _register(agent: Agent, source: PageSource) -> bytes:
    """Registers the pool's pages, and theirs only; returns the frame that tells a reader."""
    facts = source.facts
    base = address_of(source.payload(0))
    agent.register(base, (facts.num_pages - 1) * facts.stride_bytes + facts.page_bytes)
    return Region(
        base=base,
        stride_bytes=facts.stride_bytes,
        num_pages=facts.num_pages,
        device=HOST_MEMORY,
        metadata=agent.metadata(),
    ).pack()
