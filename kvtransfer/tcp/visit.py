"""One connection of a tcp reader, from hello to its end.

What lives here: asking for pages, taking the answers, noticing that the source is silent. What does not:
dialling again and what a lost connection means for reads (`kvtransfer.tcp.reader`).
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from kvtransfer.hello import accept, introduce, refusal
from kvtransfer.listener import Signal, Stalled, Waiter
from kvtransfer.reads import Counters, Pending, ReadTable, State
from kvtransfer.stream import FrameReceiver, FrameSender, PeerClosed
from kvtransfer.tcp.pump import NUM_SLOTS, PagePump
from kvtransfer.transport import ReaderConfig, ReadStatus
from kvtransfer.wire import MAX_PAGES_PER_READ, Frame, Kind, Read, WireError, pack
from pdserve import clock

_GREETINGS = frozenset({Kind.WELCOME, Kind.REFUSED})
_ANSWERS = frozenset({Kind.PAGE, Kind.STALE, Kind.DENIED, Kind.DROPPED})
_BATCH_BYTES = 65536
_MAX_ASKED = NUM_SLOTS
_FIRST_ASKED = 16  # by themselves, so that the source has work while the rest is packed
_LOW_ASKED = 768  # with fewer on their way, more are asked for even while pages come


class Visit:
    """A connection in the hands of the reader's thread; cancelled: asked reads that were cancelled since.
    compiled: whether compiled code takes its pages."""

    def __init__(
        self,
        sock: socket.socket,
        config: ReaderConfig,
        reads: ReadTable,
        counters: Counters,
        wake: Signal,
        cancelled: deque[Pending],
        *,
        compiled: bool,
    ) -> None:
        self._sock, self._config, self._reads = sock, config, reads
        self._counters, self._wake, self._cancelled = counters, wake, cancelled
        self._receiver: FrameReceiver | PagePump = FrameReceiver(
            sock, expect=_GREETINGS, page_bytes=config.page_bytes, place=self._place
        )
        self._compiled = compiled
        self._pump: PagePump | None = None
        self._sender = FrameSender(sock)
        self._waiter = Waiter(sock, wake)
        self._awaited: dict[int, Pending] = {}
        self._sequence = self._num_answers = 0
        self._scratch: memoryview | None = None
        self._heard_at = time.monotonic()

    def greet(self, first: Pending) -> None:
        """Says hello with the ticket of `first`. Raises Refused, Stalled, WireError, PeerClosed, OSError."""
        self._sender.load(introduce(self._config, first.request))
        while self._goes_on():
            self._sender.pump()
            frame = self._receiver.pump()
            if frame is not None:
                accept(frame, self._config)
                self._counters.add("connections")
                self._take_pages()
                self._heard_at = time.monotonic()
                return
            self._wait(self._heard_at + self._config.stall_s)
        raise PeerClosed

    def _take_pages(self) -> None:
        page_bytes = self._config.page_bytes
        if self._compiled:
            self._pump = PagePump(
                self._sock, self._wake, expect=_ANSWERS, page_bytes=page_bytes, header=self._reads.header,
                landed=self._landed, may_wait=lambda: bool(self._awaited) and not self._sender.busy,
            )  # fmt: skip
            self._receiver = self._pump
        else:
            self._receiver = FrameReceiver(
                self._sock, expect=_ANSWERS, page_bytes=page_bytes, place=self._place
            )

    def run(self) -> None:
        """Reads until the reader is closed, or there was nothing to do for idle_s, or the source left while
        nothing was asked of it. Raises Stalled, WireError, PeerClosed or OSError at any other end."""
        while self._goes_on():
            try:
                self._receive()
            except PeerClosed:
                if self._awaited or not self._num_answers:
                    raise
                return
            self._ask()
            if self._idle():
                if time.monotonic() >= self._heard_at + self._config.idle_s:
                    return
                self._rest()
            else:
                self._wait(self._deadline())
        raise PeerClosed

    def _goes_on(self) -> bool:
        """Whether the reader is open. What the host says from now on ends a wait, even if it says it now."""
        self._wake.clear()
        return not self._reads.closed

    def _receive(self) -> None:
        while (frame := self._receiver.pump()) is not None:
            self._heard_at = time.monotonic()
            self._answer(frame)
            self._ask_more()

    def _ask_more(self) -> None:
        if self._cancelled or (len(self._awaited) < _LOW_ASKED and self._reads.any_waiting):
            self._ask()

    def _landed(self, pages: Sequence[tuple[int, int, bytes]]) -> None:
        """The pump's pages: sequence, when (0: cancelled), digest."""
        self._heard_at = time.monotonic()
        self._num_answers += len(pages)
        reads, found = self._reads, []
        for sequence, arrived_ns, digest in pages:
            pending = self._awaited.pop(sequence)
            if arrived_ns:
                reads.arrived(pending, clock.at(arrived_ns / 1e9))
                found.append((pending, digest if reads.header else reads.digest(pending)))
        reads.verify_all(found)
        self._ask_more()

    def _answer(self, frame: Frame) -> None:
        pending = self._awaited.pop(frame.sequence, None)
        if pending is None:
            raise WireError("an answer nobody asked for")
        self._num_answers += 1
        if frame.kind is Kind.STALE:
            self._reads.end(pending, ReadStatus.STALE)
        elif frame.kind is Kind.DENIED:
            self._reads.end(pending, ReadStatus.FAILED, detail=refusal(frame.code))
        elif frame.kind is Kind.DROPPED:
            self._reads.end(pending, ReadStatus.FAILED, detail="dropped")
        elif pending.state is State.MOVING:
            self._reads.arrived(pending)
            self._reads.verify(pending, self._reads.digest(pending))

    def _place(self, sequence: int) -> memoryview:
        pending = self._awaited.get(sequence)
        if pending is None:
            raise WireError("a page nobody asked for")
        if self._reads.begin(pending):
            return pending.request.target
        if self._scratch is None:
            self._scratch = memoryview(bytearray(self._config.page_bytes))
        return self._scratch

    def _ask(self) -> None:
        while self._sender.pump():
            batch = self._cancels() + self._wishes()
            if not batch:
                return
            self._sender.load(batch)

    def _cancels(self) -> bytes:
        frames = []
        while self._cancelled:
            pending = self._cancelled.popleft()
            if self._awaited.get(pending.sequence) is pending:
                frames.append(pack(Kind.CANCEL, sequence=pending.sequence))
        return b"".join(frames)

    def _wishes(self) -> bytes:
        left = min(self._room(), MAX_PAGES_PER_READ if self._awaited else _FIRST_ASKED)
        frames, size = [], 0
        while left and size < _BATCH_BYTES and (batch := self._reads.ask(left)):
            if not self._awaited:
                self._heard_at = time.monotonic()
            frames.append(_wish(batch).pack(self._sequence + 1))
            size += len(frames[-1])
            left -= len(batch)
            for pending in batch:
                self._sequence += 1
                pending.sequence = self._sequence
                self._awaited[pending.sequence] = pending
            if self._pump is not None:
                self._reads.lend(batch, self._pump.lend, self._pump.call_off)
        return b"".join(frames)

    def _room(self) -> int:
        """How many more may be asked; of answers in order, all that are not on their way."""
        oldest = next(iter(self._awaited), self._sequence + 1)
        return _MAX_ASKED - (self._sequence + 1 - oldest)

    def _idle(self) -> bool:
        return not self._awaited and not self._sender.busy and self._receiver.begun_at is None

    def _rest(self) -> None:
        try:
            self._wait(self._heard_at + self._config.idle_s)
        except Stalled:
            return  # the loop sees that the time is up

    def _deadline(self) -> float:
        begun = (self._receiver.begun_at, self._sender.begun_at, self._heard_at)
        return min((at for at in begun if at is not None), default=math.inf) + self._config.stall_s

    def _wait(self, deadline: float) -> None:
        mask = select.POLLIN | (select.POLLOUT if self._sender.busy else 0)
        self._waiter.wait(mask, deadline)


def _wish(batch: list[Pending]) -> Read:
    """One frame for reads of one request."""
    request = batch[0].request
    sources = [pending.request.source for pending in batch]
    pages = [(source.page, source.generation) for source in sources]
    return Read(key=request.key, ticket=request.ticket, pages=pages)
