"""Page reads in flight on a decode worker: target pages, I/O pins, and reads that do not end. Pure.

What lives here: which read writes which pages. What does not: when to read (`kvtransfer.session.decode`) and
the transports (`decode_worker.reads`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from decode_worker.entry import Entry
from decode_worker.measures import read_again
from kvtransfer.effects import CancelRead, Count, Effect, Relay, StartRead
from kvtransfer.session.decode_events import ReadEnded, WrongPage
from kvtransfer.session.guard import RoleContext
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Announce
from pdserve.types import Key, PeerRef


@dataclass(slots=True, kw_only=True)
class Read:
    """One read in flight. part: which of the parts that make the page. pages: that it may write."""

    entry: Entry
    index: int
    part: int
    pages: tuple[int, ...]


class Pulls:
    """All reads of one decode worker. Called by the control thread only.

    Reads start in the order of time, so each queue is sorted by when something is due: no input looks at
    every read (thousands wait when a wire is slow).
    """

    def __init__(self, ctx: RoleContext, pages: PageManager) -> None:
        self._ctx = ctx
        self._pages = pages
        self._reads: dict[int, Read] = {}
        self._by_key: dict[Key, set[int]] = {}
        self._young: deque[tuple[float, int]] = deque()
        """(when, which) to cancel: one lease after its start."""
        self._cancelled: deque[tuple[float, int]] = deque()
        """(when, which) to quarantine: one lease after it was cancelled, however late that was."""
        self._next = 1

    def next_timer(self) -> float:
        """When tick is due next; infinity if never."""
        return min(self._due(self._young), self._due(self._cancelled))

    def _due(self, queue: deque[tuple[float, int]]) -> float:
        while queue and queue[0][1] not in self._reads:
            queue.popleft()
        return queue[0][0] if queue else float("inf")

    def start(self, entry: Entry, announce: Announce, now: float) -> list[Effect]:
        """Pins the target page of an announced one and pulls it, if it is the page our tokens ask for."""
        peer = entry.call.prefill
        assert peer is not None
        if not entry.held.expects(announce):
            # Not our prefix: the bytes may be right for somebody else's (protocol.md §2, content key).
            entry.todo.append(WrongPage(index=announce.index))
            return [Count(name="wrong_content_key")]
        entry.announced_at = entry.announced_at or now
        entry.pages.announced(announce.index, announce.sealed_s, now)
        spread = entry.spread
        lacking = {entry.held.pages[index]: index for index in spread.lacking(announce.index)}
        new = [page for page in lacking if self._pages.state(page) is PageState.RESERVED]
        for page in new:
            self._pages.fill(page)
        relay, pages = spread.relay(announce.index, entry.held.pages), tuple(lacking)
        parts = range(len(spread.origin.parts))
        first, *others = (self._start(entry, announce, part, peer, pages, relay, now) for part in parts)
        blank = tuple(page for page in new if not spread.covers(lacking[page]))
        return [replace(first, blank=blank) if blank else first, *others, *read_again(entry, announce.index)]

    def _start(
        self, entry: Entry, announce: Announce, part: int, peer: PeerRef, pages: tuple[int, ...],
        relay: Relay | None, now: float,
    ) -> StartRead:  # fmt: skip
        """One part's read, with pins of its own. An announced digest has one of each rank, in order."""
        read_id, origin = self._next, entry.held.origin
        self._next += 1
        self._reads[read_id] = Read(entry=entry, index=announce.index, part=part, pages=pages)
        self._by_key.setdefault(entry.session.key, set()).add(read_id)
        self._young.append((now + self._ctx.lease_s, read_id))
        for page in pages:
            self._pages.hold(page, Holder(HolderKind.IO, f"read:{read_id}"))
        rank, size = origin.parts[part], len(announce.digest) // origin.num_ranks
        return StartRead(
            read_id=read_id, peer=peer, key=announce.key, ticket=entry.call.ticket, source=announce.page,
            index=announce.index, valid_rows=announce.valid_rows,
            digest=announce.digest[rank * size : (rank + 1) * size], target_page=pages[0], rank=rank,
            num_ranks=origin.num_ranks, relay=relay,
        )  # fmt: skip

    def cancel(self, entry: Entry) -> list[Effect]:
        """Cancels the reads of one key that have not begun."""
        return [CancelRead(read_id=i) for i in sorted(self._by_key.get(entry.session.key, ()))]

    def done(
        self, read_id: int, status: ReadStatus, digest: bytes, path: str, stamps: tuple[float, float]
    ) -> tuple[Entry, ReadEnded]:
        """A read ended: its pin goes. Whose it was, and what that session has to hear.

        stamps: when its bytes were in place, and when they were verified.
        """
        read = self._reads.pop(read_id)
        self._forget(read.entry.session.key, read_id)
        for page in read.pages:
            self._pages.drop(page, Holder(HolderKind.IO, f"read:{read_id}"))
        good = status is ReadStatus.GOOD
        read.entry.pages.ended(read.index, arrived=stamps[0], verified=stamps[1], good=good)
        if good:
            read.entry.moved_pages += read.part == 0
            read.entry.path = path
        return read.entry, ReadEnded(index=read.index, status=status, digest=digest, rank=read.part)

    def tick(self, now: float) -> list[Effect]:
        """A read over one lease is cancelled, which ends it if it has not begun. One that was begun and
        does not end within another lease: its page is never used again (protocol.md §1)."""
        out: list[Effect] = []
        while now >= self._due(self._young):
            _, read_id = self._young.popleft()
            self._cancelled.append((now + self._ctx.lease_s, read_id))
            out.append(CancelRead(read_id=read_id))
        while now >= self._due(self._cancelled):
            _, read_id = self._cancelled.popleft()
            for page in self._reads[read_id].pages:
                self._pages.quarantine(page)
                out.append(Count(name="quarantined"))
        return out

    def _forget(self, key: Key, read_id: int) -> None:
        ids = self._by_key[key]
        ids.discard(read_id)
        if not ids:
            del self._by_key[key]
