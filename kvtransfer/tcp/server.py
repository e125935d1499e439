"""The source end of the tcp transport: pages leave in frames, straight from pool memory.

What lives here: one connection's life (hello, queued reads, one page at a time) and the server that accepts
them. What does not: the frames themselves (`kvtransfer.wire`), threads and stopping (`kvtransfer.listener`).

A queued read holds nothing; its page is checked and pinned right before its load of frames (a few, or one
large page) begins and unpinned right after the last byte, so a page that goes while its read waits
makes a STALE frame. Every connection has its own queue and thread: a reader that does not take its bytes
delays no other.
"""

from __future__ import annotations

import itertools
import math
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping

from kvtransfer.hello import judge
from kvtransfer.listener import Listener, Signal, Stalled, Waiter
from kvtransfer.reads import Counters
from kvtransfer.sockets import accepting, address, bound
from kvtransfer.stream import FrameReceiver, FrameSender
from kvtransfer.transport import PageSource, ServerConfig
from kvtransfer.wire import Code, Frame, Hello, Kind, Read, WireError, pack, page_frame
from pdserve.types import Key

_serial = itertools.count()
_LOAD_BYTES = 256 * 1024  # of larger ones the socket buffer leaves the cache: a fifth slower (decision 7)
_MAX_PARTS = 256  # a system call takes 1,024


class TcpPageServer:
    """A `PageServer` over TCP."""

    def __init__(self, source: PageSource, config: ServerConfig) -> None:
        self._source, self._config = source, config
        self._counters, self._stop = Counters(), Signal()
        self._listener: Listener | None = None
        self._endpoint = ""

    def start(self) -> None:
        """Binds, listens and accepts. Raises OSError."""
        sock = bound(self._config.host, self._config.port)
        self._endpoint = address(sock)
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
        """host:port."""
        return self._endpoint

    def counters(self) -> Mapping[str, int]:
        """See PageServer."""
        return self._counters.snapshot()

    def close(self) -> None:
        """See PageServer."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._stop.close()

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _Connection(sock, self._source, self._config, self._counters, self._stop).run()


_Job = tuple[int, int, Key] | bytes
"""An answer that is due: page, generation and whose it must be, or a short frame."""


class _Connection:
    """One reader's connection, in its own thread."""

    def __init__(
        self, sock: socket.socket, source: PageSource, config: ServerConfig, counters: Counters, stop: Signal
    ) -> None:
        self._sock, self._source, self._config = sock, source, config
        self._counters, self._stop = counters, stop
        self._receiver = FrameReceiver(sock, expect=frozenset({Kind.HELLO}))
        self._sender = FrameSender(sock)
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._id = next(_serial)
        self._page_bytes = source.facts.page_bytes
        self._max_pages = math.ceil(_LOAD_BYTES / max(1, self._page_bytes))
        self._pins: dict[int, str] = {}
        self._waiter = Waiter(sock, stop)
        self._greeted = self._refused = False
        self._quiet_since = time.monotonic()

    def run(self) -> None:
        """Serves until the reader leaves, is refused or the server stops."""
        try:
            while not self._stop.is_set() and not self._over():
                self._receive()
                self._send()
                self._wait()
        finally:
            self._unpin()

    def _over(self) -> bool:
        return self._refused and not self._sender.busy

    def _receive(self) -> None:
        while not self._refused:
            frame = self._receiver.pump()
            if frame is None:
                return
            self._quiet_since = time.monotonic()
            if frame.kind is Kind.HELLO:
                self._hello(frame)
            elif frame.kind is Kind.READ:
                self._queue(frame)
            else:
                self._cancel(frame)

    def _hello(self, frame: Frame) -> None:
        code, answer = judge(Hello.unpack(frame.body), self._source)
        self._sender.load(answer)
        self._refused = code is not Code.NONE
        self._greeted = True
        if self._refused:
            self._counters.add("refused")
        else:
            self._receiver.expect = frozenset({Kind.READ, Kind.CANCEL})

    def _queue(self, frame: Frame) -> None:
        read, jobs = Read.unpack(frame.body), self._jobs
        last = frame.sequence + len(read.pages) - 1
        if len(jobs) + len(read.pages) > self._config.max_queued or last >= 2**64:
            raise WireError("a reader asks for too much")
        allowed = self._source.authorise(read.ticket, read.key)
        for sequence, (page, generation) in enumerate(read.pages, frame.sequence):
            if sequence in jobs:
                raise WireError("a read's number is taken")
            if not allowed:
                jobs[sequence] = self._denied(sequence, Code.BAD_TICKET)
            elif page >= self._source.facts.num_pages:
                jobs[sequence] = self._denied(sequence, Code.NO_SUCH_PAGE)
            else:
                jobs[sequence] = (page, generation, read.key)

    def _denied(self, sequence: int, code: Code) -> bytes:
        self._counters.add("denied")
        return pack(Kind.DENIED, code=code, sequence=sequence)

    def _cancel(self, frame: Frame) -> None:
        # Its answer may be under way or out already: then that is the one answer.
        if frame.sequence in self._pins:
            self._sender.own()  # a slow wire must not hold the pages of a transfer that is over
            self._unpin()
        if frame.sequence in self._jobs:
            self._counters.add("dropped")
            self._jobs[frame.sequence] = pack(Kind.DROPPED, sequence=frame.sequence)

    def _send(self) -> None:
        if self._sender.busy:
            if not self._sender.pump():
                return
            self._unpin()
        if self._jobs:
            self._sender.load(*self._next_load())
            if self._sender.pump():
                self._unpin()
            self._quiet_since = time.monotonic()

    def _next_load(self) -> list[bytes | memoryview]:
        """Frames of the first queued reads: one page, or some small ones."""
        parts: list[bytes | memoryview] = []
        jobs, room = self._jobs, self._max_pages
        while jobs and room and len(parts) < _MAX_PARTS:
            sequence, job = jobs.popitem(last=False)
            if isinstance(job, bytes):
                parts.append(job)
            elif self._pin(sequence, *job):
                parts += (page_frame(sequence, self._page_bytes), self._source.payload(job[0]))
                room -= 1
            else:
                self._counters.add("stale")
                parts.append(pack(Kind.STALE, sequence=sequence))
        num_pages = self._max_pages - room
        self._counters.add_all({"pages": num_pages, "bytes": num_pages * self._page_bytes})
        return parts

    def _pin(self, sequence: int, page: int, generation: int, key: Key) -> bool:
        pin_id = f"tcp:{self._id}:{next(_serial)}"  # sequences are the reader's, and it may use one again
        if not self._source.pin(page, generation, key, pin_id):
            return False
        self._pins[sequence] = pin_id
        return True

    def _unpin(self) -> None:
        for pin_id in self._pins.values():
            self._source.unpin(pin_id)
        self._pins.clear()

    def _wait(self) -> None:
        if self._over() or (self._jobs and not self._sender.busy):
            return
        mask = select.POLLIN | (select.POLLOUT if self._sender.busy else 0)
        try:
            self._waiter.wait(mask, self._deadline())
        except Stalled:
            if self._greeted and not self._sender.busy and self._receiver.begun_at is None:
                self._counters.add("idle")
                self._refused = True
                return
            raise

    def _deadline(self) -> float:
        """When this connection is dead: a frame or the hello has to be through in stall_s, a pause may last
        idle_s."""
        stall, begun = self._config.stall_s, (self._receiver.begun_at, self._sender.begun_at)
        slow = min((at + stall for at in begun if at is not None), default=math.inf)
        return min(slow, self._quiet_since + (self._config.idle_s if self._greeted else stall))
