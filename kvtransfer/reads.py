"""A reader's pending reads: the one place that makes sure `done` is called exactly once for each.

What lives here: states of a read, shared by the host's thread and the reader's own, and the check of what
arrived. What does not: sockets, mappings, and when to begin a read.

    waiting → asked → moving → ended    cancel ends a waiting or asked read at once, a moving one not at all

Asked reads may be lent to compiled code, which begins them without our lock; then only it knows which move.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from kvtransfer import verdict
from kvtransfer.digest import PageDigester
from kvtransfer.hello import digest_header
from kvtransfer.transport import Done, ReadDone, ReaderConfig, ReadRequest, ReadStatus
from kvtransfer.wire import sendable
from pdserve import failpoints
from pdserve.clock import monotonic
from pdserve.types import Key

log = logging.getLogger(__name__)


class State(Enum):
    """Where a read stands. Only a MOVING one may touch its target."""

    WAITING = auto()
    ASKED = auto()
    MOVING = auto()
    ENDED = auto()


class Pending:
    """A read on its way. Its state belongs to the ReadTable; sequence is the reader's, for its wire.
    call_off: given the sequence, whether the page of a read that was lent has not begun, and never will."""

    __slots__ = ("arrived_s", "call_off", "done", "request", "sequence", "state")

    def __init__(self, request: ReadRequest, done: Done) -> None:
        self.request, self.done = request, done
        self.state = State.WAITING
        self.sequence = 0
        self.arrived_s: float | None = None
        self.call_off: Callable[[int], bool] | None = None


class Counters:
    """Named counts that any thread may add to and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount`."""
        with self._lock:
            self._counts[name] += amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Adds several, at once for whoever takes a snapshot."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def snapshot(self) -> Mapping[str, int]:
        """A copy of all counts."""
        with self._lock:
            return dict(self._counts)


class ReadTable:
    """All pending reads of one reader. Every method may be called from any thread."""

    def __init__(
        self,
        config: ReaderConfig,
        counters: Counters,
        digester: Callable[[bytes], PageDigester] = PageDigester,
    ) -> None:
        """digester: makes what digests pages, of their header. Compiled code can do that in its place if
        `header` is one."""
        self._config, self._counters = config, counters
        self._digest = digester(digest_header(config))
        self.header = digest_header(config) if digester is PageDigester else None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiters = 0
        self._sendable: tuple[Key, bytes] | None = None
        self._by_id: dict[int, Pending] = {}
        self._waiting: deque[Pending] = deque()
        self._closed = False

    def add(self, request: ReadRequest, done: Done) -> None:
        """Queues a read; in a closed table it fails at once, as do reads of another pool or beyond the wire's
        limits.

        Raises ValueError for a target that can not hold the page, or a read_id that is pending.
        """
        target = request.target
        if target.readonly or not target.contiguous or target.nbytes != self._config.page_bytes:
            raise ValueError(f"the target must be {self._config.page_bytes} writable contiguous bytes")
        pending = Pending(request, done)
        with self._lock:
            if request.read_id in self._by_id:
                raise ValueError(f"read {request.read_id} is pending already")
            self._by_id[request.read_id] = pending
            refusal = self._refusal(request)
            if not refusal:
                self._waiting.append(pending)
                if self._num_waiters:
                    self._changed.notify()
        if refusal:
            self.end(pending, ReadStatus.FAILED, detail=refusal)

    def _refusal(self, request: ReadRequest) -> str:
        if self._closed:
            return "closed"
        if request.source.pool_id != self._config.pool_id:
            return "wrong pool"
        in_range = 0 <= request.source.page < 2**64 and 0 <= request.source.generation < 2**64
        return "" if in_range and self._can_send(request.key, request.ticket) else "unsendable"

    def _can_send(self, key: Key, ticket: bytes) -> bool:
        last = self._sendable
        if last is not None and last[0] is key and last[1] is ticket:
            return True
        if not sendable(key, ticket):
            return False
        self._sendable = (key, ticket)
        return True

    def peek(self) -> Pending | None:
        """The first waiting read, left where it is."""
        with self._lock:
            self._skip_ended()
            return self._waiting[0] if self._waiting else None

    @property
    def any_waiting(self) -> bool:
        """Whether a read may wait; without the lock, so it may be old news."""
        return bool(self._waiting)

    def ask(self, limit: int) -> list[Pending]:
        """The first waiting reads of one request, now asked; at most `limit`, none if none waits."""
        with self._lock:
            return self._ask(limit)

    def wait_and_ask(self) -> Pending | None:
        """Waits for a read, which is now asked; None means the table was closed."""
        with self._lock:
            while not self._closed:
                if asked := self._ask(1):
                    return asked[0]
                self._num_waiters += 1
                self._changed.wait()
                self._num_waiters -= 1
            return None

    def begin_more(self, limit: int) -> list[Pending]:
        """The first waiting reads, at most `limit`, moving at once: for readers who ask nobody."""
        begun: list[Pending] = []
        with self._lock:
            while self._waiting and len(begun) < limit:
                pending = self._waiting.popleft()
                if pending.state is not State.ENDED:
                    pending.state = State.MOVING
                    begun.append(pending)
        for _ in begun:
            failpoints.stall("wire")
        return begun

    def _ask(self, limit: int) -> list[Pending]:
        asked: list[Pending] = []
        while self._waiting and len(asked) < limit:
            pending = self._waiting[0]
            if pending.state is not State.ENDED:
                if asked and not _of_one_request(asked[0].request, pending.request):
                    break
                pending.state = State.ASKED
                asked.append(pending)
            self._waiting.popleft()
        return asked

    def _skip_ended(self) -> None:
        while self._waiting and self._waiting[0].state is State.ENDED:
            self._waiting.popleft()

    def begin(self, pending: Pending) -> bool:
        """An asked read is now moving; False if it was cancelled, and then its target must not be touched."""
        with self._lock:
            if pending.state is State.ENDED:
                return False
            pending.state = State.MOVING
        failpoints.stall("wire")
        return True

    def lend(
        self,
        asked: Sequence[Pending],
        take: Callable[[Sequence[Pending]], None],
        call_off: Callable[[int], bool],
    ) -> None:
        """Lets compiled code begin these reads. take: called once, under the lock; some may be ENDED.
        call_off: see Pending."""
        with self._lock:
            take(asked)
            for pending in asked:
                pending.call_off = call_off

    def arrived(self, pending: Pending, now: float | None = None) -> None:
        """All bytes of a read are in its target, since `now`. Without this they arrive when they are
        verified."""
        pending.arrived_s = monotonic() if now is None else now

    def cancel(self, read_id: int) -> Pending | None:
        """Ends a read that has not begun. Returns it if the peer was asked for it already."""
        with self._lock:
            pending = self._by_id.get(read_id)
            if pending is None or pending.state is State.MOVING:
                return None
            was_asked = pending.state is State.ASKED
            if pending.call_off is not None and not pending.call_off(pending.sequence):
                return None
            self._forget(pending)
        self._report(pending, ReadStatus.FAILED, detail="cancelled")
        return pending if was_asked else None

    def digest(self, pending: Pending) -> bytes:
        """The digest of the bytes in a read's target. For the reader's own thread."""
        request = pending.request
        return self._digest(request.target, index=request.index, valid_rows=request.valid_rows)

    def verify(self, pending: Pending, digest: bytes) -> None:
        """Ends a read whose bytes are all in the target and have that digest: GOOD or MISMATCH."""
        self.verify_all([(pending, digest)])

    def verify_all(self, found: Sequence[tuple[Pending, bytes]]) -> None:
        """`verify` of several reads."""
        for pending, _ in found:
            if pending.arrived_s is None:
                self.arrived(pending)
        for _ in found:
            failpoints.stall("verify")
        with self._lock:
            for pending, _ in found:
                self._forget(pending)
        statuses = [
            verdict.verdict(stale=False, intact=verdict.is_intact(digest, pending.request.digest))
            for pending, digest in found
        ]
        counts = {status.value: statuses.count(status) for status in set(statuses)}
        self._counters.add_all(counts | {"bytes": len(found) * self._config.page_bytes})
        verified_s = monotonic()
        for (pending, digest), status in zip(found, statuses, strict=True):
            self._tell(pending, status, digest=digest, verified_s=verified_s)

    def end(self, pending: Pending, status: ReadStatus, *, detail: str = "") -> None:
        """Ends a read and calls `done`; without effect on one that has ended."""
        with self._lock:
            if pending.state is State.ENDED:
                return
            self._forget(pending)
        self._report(pending, status, detail=detail)

    def end_all(self, detail: str) -> None:
        """Ends every read with FAILED. For the thread that moves bytes, when it moves none."""
        with self._lock:
            ended = list(self._by_id.values())
            for pending in ended:
                self._forget(pending)
            self._waiting.clear()
        for pending in ended:
            self._report(pending, ReadStatus.FAILED, detail=detail)

    def close(self) -> bool:
        """Takes no more reads and wakes a waiter. False if it was closed before."""
        with self._lock:
            was_open, self._closed = not self._closed, True
            self._changed.notify_all()
            return was_open

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _forget(self, pending: Pending) -> None:
        pending.state = State.ENDED
        self._by_id.pop(pending.request.read_id, None)

    def _report(
        self, pending: Pending, status: ReadStatus, *, digest: bytes = b"", detail: str = "",
        verified_s: float | None = None,
    ) -> None:  # fmt: skip
        self._counters.add(status.value)
        self._tell(pending, status, digest=digest, detail=detail, verified_s=verified_s)

    def _tell(
        self, pending: Pending, status: ReadStatus, *, digest: bytes = b"", detail: str = "",
        verified_s: float | None = None,
    ) -> None:  # fmt: skip
        try:
            pending.done(
                ReadDone(
                    read_id=pending.request.read_id, status=status, digest=digest, detail=detail,
                    arrived_s=pending.arrived_s, verified_s=verified_s,
                )
            )  # fmt: skip
        except Exception:
            # One host callback that raises must not take the other reads' thread with it.
            log.exception("a read's done callback failed")


def _of_one_request(one: ReadRequest, other: ReadRequest) -> bool:
    same_key = one.key is other.key or one.key == other.key
    return same_key and one.ticket == other.ticket
