"""The decode side of one request: rows D1-D14 of protocol.md §9, as a pure state machine.

What lives here: states, which pages are wanted, read, verified, when to commit, to go on locally, to end.
What does not: pages, the scheduler and the network; `decode_worker.loop` carries the effects out.
The state is changed in place by `step`, which returns the effects; nothing else may change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.digest import digest_of_digests
from kvtransfer.session.decode_events import (
    Accepted,
    ComputeQuiet,
    DCancelReads,
    DCount,
    DDropPages,
    DEffect,
    DEmit,
    DEnd,
    DEvent,
    DRead,
    DRelease,
    DRun,
    DRunLocal,
    DSend,
    DStopCompute,
    Finished,
    PeerSeen,
    ReadEnded,
    Sampled,
    Stop,
    Switch,
    Tick,
    WrongPage,
)
from kvtransfer.session.guard import finish_record
from kvtransfer.transport import ReadStatus
from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from pdserve.types import HandoverMode, Key, TokenLogprob

MAX_READS = 3


class DState(StrEnum):
    """States of the decode side. RETRACTED is the scheduler's; here it is part of RUNNING."""

    PULL = "pull"
    LOCAL = "local"
    RUNNING = "running"
    CLOSING = "closing"
    DONE = "done"


@dataclass(slots=True, kw_only=True)
class _Incoming:
    """What is known of one wanted page."""

    announce: Announce
    verified: bool = False
    reads: int = 0
    moving: set[int] = field(default_factory=set)
    failed: ReadEnded | None = None

    @property
    def reading(self) -> bool:
        """Whether a rank may still write its part."""
        return bool(self.moving)

    def begin(self, num_ranks: int) -> None:
        """Every rank reads its part."""
        self.reads += 1
        self.moving, self.failed = set(range(num_ranks)), None

    def ended(self, event: ReadEnded) -> ReadEnded | None:
        """A rank's read ended. The page's end, once it was the last one's: good if all were (protocol.md)."""
        self.moving.discard(event.rank)
        if event.status is not ReadStatus.GOOD:
            self.failed = self.failed or event
        return None if self.moving else self.failed or event


@dataclass(slots=True, kw_only=True)
class DecodeSession:
    """State of one key on the decode side. lease_s is L; times are on the local monotonic clock.

    Pages are the prefill worker's: of its size. credit_pages: that may be announced beyond the verified ones.
    num_ranks: parts of a page; it is verified, and a key quiet, when that is so of all of them. granted:
    so far. taken: pages that a lower key had verified. next_index: of the next token to emit.
    """

    key: Key
    lease_s: float
    credit_pages: int = 256
    num_ranks: int = 1
    state: DState = DState.PULL
    num_pages: int = 0
    hit_pages: int = 0
    taken: frozenset[int] = frozenset()
    want: tuple[int, ...] = ()
    granted: int = 0
    num_verified: int = 0
    next_index: int = 0
    num_forced: int = 0
    max_tokens: int = 0
    ticket: bytes = b""
    pages: dict[int, _Incoming] = field(default_factory=dict)
    finish: Finish | None = None
    switching: bool = False
    computing: bool = False
    committed: bool = False
    ended: bool = False
    granted_again_at: float = float("inf")
    settle_until: float = float("inf")
    lease_until: float = float("inf")
    deadline_at: float = float("inf")
    outcome: Outcome = Outcome.UNKNOWN

    @property
    def live(self) -> bool:
        return self.state in (DState.PULL, DState.LOCAL, DState.RUNNING)

    @property
    def pulling(self) -> bool:
        """Whether the prefill side must be kept alive by renewals."""
        return self.state is DState.PULL and not self.switching

    @property
    def num_reading(self) -> int:
        return sum(1 for p in self.pages.values() if p.reading)

    @property
    def reading(self) -> frozenset[int]:
        """Indices whose target page may still be written."""
        return frozenset(i for i, p in self.pages.items() if p.reading)

    @property
    def verified_prefix(self) -> int:
        """Pages of the prompt, from the first on, that are hits or verified."""
        count = self.hit_pages
        while count in self.taken or (count in self.pages and self.pages[count].verified):
            count += 1
        return count

    def next_timer(self) -> float:
        """When Tick is due next; infinity if never."""
        if not self.live:
            return float("inf")
        if not self.pulling:
            return self.deadline_at
        return min(self.deadline_at, self.granted_again_at, self.lease_until, self.settle_until)

    # -- the table --------------------------------------------------------------------------------------

    def step(self, event: DEvent, now: float) -> list[DEffect]:
        """Applies one event. One that means nothing in this state (a duplicate, a late one) has no effect."""
        match event:
            case Accepted():
                return self._on_accepted(event, now)
            case Announce():
                return self._on_announce(event, now)
            case ReadEnded():
                return self._on_read(event, now)
            case WrongPage():
                self.pages[event.index].moving.clear()
                return self._switch("prefill announced a page of another prefix", tell_peer=True)
            case Finish():
                return self._on_finish(event, now)
            case Abort():
                return self._on_abort(event, now)
            case Switch():
                return self._switch(event.detail, tell_peer=True)
            case Sampled():
                return self._on_sampled(event)
            case Finished():
                return self._on_finished(event)
            case Stop():
                return self._on_stop(event)
            case PeerSeen():
                self.lease_until = now + self.lease_s
                return []
            case ComputeQuiet():
                self.computing = False
                return self._maybe_release()
            case Tick():
                return self._on_tick(now)

    def _on_accepted(self, event: Accepted, now: float) -> list[DEffect]:
        self.num_pages, self.hit_pages = event.num_pages, event.hit_pages
        self.ticket, self.num_forced = event.ticket, event.num_forced
        self.max_tokens, self.deadline_at = event.max_tokens, event.deadline_at
        self.taken, self.next_index = event.verified, event.num_forced
        self.want = tuple(i for i in range(self.hit_pages, self.num_pages) if i not in self.taken)
        if event.mode is HandoverMode.LOCAL:
            self.state = DState.LOCAL
            self.computing = True
            return [DRunLocal(verified_pages=self.verified_prefix)]
        self.lease_until = now + self.lease_s
        return self._grant(now)

    def _limit(self) -> int:
        """How many pages P may have announced in all by now: what is verified, and a window."""
        return min(self.num_verified + self.credit_pages, len(self.want))

    def _grant(self, now: float) -> list[DEffect]:
        self.granted = max(self.granted, self._limit())
        self.granted_again_at = now + self.lease_s / 4
        grant = Grant(key=self.key, want=self.want, credit=self.granted, ticket=self.ticket)
        return [DSend(message=grant)]

    def _grant_more(self, now: float) -> list[DEffect]:
        """Says so when a good part of the window is free again, and when all pages may come."""
        limit = self._limit()
        grown = limit - self.granted
        if grown <= 0 or (grown < self.credit_pages // 4 and limit < len(self.want)):
            return []
        return self._grant(now)

    def _heard(self, now: float) -> None:
        """P lives. The Grant is repeated until P has used it: the one that raised the limit may be lost."""
        self.lease_until = now + self.lease_s
        if len(self.pages) >= self.granted:
            self.granted_again_at = float("inf")

    def _progressed(self, now: float) -> None:
        """P lives and says that it is done, or has sent its last page: what is missing then comes within a
        lease, through all of P's repeats, or never. Before that P may be waiting or computing."""
        whole = bool(self.want) and self.verified_prefix == self.num_pages
        self.settle_until = now + self.lease_s if whole or self.finish is not None else float("inf")

    def _late(self) -> list[DEffect]:
        """P still talks about a transfer that is over here: say what became of it."""
        if self.committed:
            return [DSend(message=Commit(key=self.key))]
        outcome = Outcome.SUPERSEDED if self.live else self.outcome
        return [DSend(message=Abort(key=self.key, outcome=outcome))]

    def _on_announce(self, event: Announce, now: float) -> list[DEffect]:
        if not self.pulling:
            return self._late()
        if not self.hit_pages <= event.index < self.num_pages or event.index in self.taken:
            return self._switch("prefill announced a page that was not granted", tell_peer=True)
        page = self.pages.get(event.index)
        if page is None and len(self.pages) >= self.granted:
            over = self._switch("prefill announced more pages than it was granted", tell_peer=True)
            return [DCount(name="over_credit"), *over]
        if page is None:
            page = self.pages[event.index] = _Incoming(announce=event)
        self._heard(now)
        if page.announce.digest != event.digest:
            return self._switch("one page was announced with two digests", tell_peer=True)
        if page.verified:
            return [DSend(message=Ack(key=self.key, index=event.index))]
        if page.reading:
            return []
        page.announce = event
        page.begin(self.num_ranks)
        return [DRead(announce=event)]

    def _on_read(self, event: ReadEnded, now: float) -> list[DEffect]:
        page = self.pages[event.index]
        last = page.ended(event)
        if last is None:
            return []
        event = last
        if self.state is DState.PULL and event.status is ReadStatus.GOOD:
            page.verified = True
            self.num_verified += 1
            self._progressed(now)
        if self.switching:
            return self._maybe_local()
        if self.state is not DState.PULL:
            return self._maybe_release()
        if event.status is ReadStatus.GOOD:
            ack: list[DEffect] = [DSend(message=Ack(key=self.key, index=event.index))]
            return ack + self._grant_more(now) + self._maybe_run()
        if event.status is ReadStatus.MISMATCH and page.reads < MAX_READS:
            return [DSend(message=Nack(key=self.key, index=event.index, digest=event.digest))]
        if event.status is ReadStatus.FAILED and page.reads < MAX_READS:
            page.begin(self.num_ranks)
            return [DRead(announce=page.announce)]
        return self._switch(f"page could not be read: {event.status}", tell_peer=True)

    def _on_finish(self, event: Finish, now: float) -> list[DEffect]:
        if not self.pulling:
            return self._late()
        self._heard(now)
        if event.index != self.num_forced:
            return self._switch("the first token has the wrong index", tell_peer=True)
        if event.finish is None and event.index + 1 >= self.max_tokens:
            return self._switch("the first token was the last, and prefill did not say so", tell_peer=True)
        if self.finish is None:
            self.finish = event
            self._progressed(now)
        return self._maybe_run()

    def _maybe_run(self) -> list[DEffect]:
        if self.finish is None or self.num_verified < len(self.want):
            return []
        seen = [(i, p.announce.digest) for i, p in sorted(self.pages.items())]
        same = digest_of_digests(seen, finish_record(self.finish)) == self.finish.digest_of_digests
        if not same or len(seen) != self.finish.num_announced:
            return self._switch("the digest over all pages and the first token differs", tell_peer=True)
        self.state = DState.RUNNING
        self.committed = True
        first = self.finish
        out: list[DEffect] = [DSend(message=Commit(key=self.key)), DRun(finish=first)]
        out += self._emit(first.index, first.token_id, first.logprob)
        if first.finish is not None:
            return out + self._end(DEnd(finish=first.finish), Outcome.COMPLETE)
        self.computing = True
        return out

    def _on_abort(self, event: Abort, now: float) -> list[DEffect]:
        """P has ended its part. If it never began, the router has been told so too, and may have another P
        for us (a higher epoch, which takes over) or say that there is none (Switch): a moment for that."""
        if event.outcome is not Outcome.NEVER_STARTED or not self.pulling:
            return self._switch(f"prefill gave up: {event.outcome}", tell_peer=False)
        self.granted_again_at = float("inf")
        self.lease_until = min(self.lease_until, now + self.lease_s / 4)
        return []

    def _switch(self, detail: str, *, tell_peer: bool) -> list[DEffect]:
        if not self.pulling:
            return []
        self.switching = True
        out: list[DEffect] = [DCancelReads()] if self.num_reading else []
        if tell_peer:
            out.append(DSend(message=Abort(key=self.key, outcome=Outcome.SUPERSEDED, detail=detail)))
        return out + self._maybe_local()

    def _maybe_local(self) -> list[DEffect]:
        if self.num_reading or self.state is not DState.PULL:
            return self._maybe_release()
        self.state = DState.LOCAL
        self.switching = False
        self.computing = True
        return [DRunLocal(verified_pages=self.verified_prefix)]

    def _on_sampled(self, event: Sampled) -> list[DEffect]:
        if self.state is DState.LOCAL:
            self.state = DState.RUNNING
        if self.state is not DState.RUNNING:
            return []
        return self._emit(event.index, event.token_id, event.logprob)

    def _emit(self, index: int, token_id: int, logprob: TokenLogprob | None) -> list[DEffect]:
        """Each index once, from the first that was not delivered before: forced tokens are never repeated."""
        if index < self.next_index:
            return []
        self.next_index = index + 1
        return [DEmit(index=index, token_id=token_id, logprob=logprob)]

    def _on_finished(self, event: Finished) -> list[DEffect]:
        self.computing = False
        if self.state is not DState.RUNNING:
            return self._maybe_release()
        return self._end(DEnd(finish=event.reason), Outcome.COMPLETE)

    def _end(self, end: DEnd, outcome: Outcome) -> list[DEffect]:
        self.state, self.outcome = DState.CLOSING, outcome
        return [end, *self._maybe_release()]

    def _on_stop(self, event: Stop) -> list[DEffect]:
        if not self.live:
            return []
        out: list[DEffect] = [DCancelReads()] if self.num_reading else []
        if self.state is DState.PULL:
            out.append(DSend(message=Abort(key=self.key, outcome=event.outcome, detail=event.label)))
        if self.computing:
            out.append(DStopCompute())
        self.switching = False
        end = DEnd(finish=None, label=event.label, message=event.message, retryable=event.retryable)
        return out + self._end(end, event.outcome)

    def _maybe_release(self) -> list[DEffect]:
        if self.state is not DState.CLOSING or self.computing:
            return []
        if self.num_reading:  # a read may last longer than the request may hold pages: its pin is enough
            return [DDropPages()]
        self.state = DState.DONE
        return [DRelease(outcome=self.outcome)]

    def _on_tick(self, now: float) -> list[DEffect]:
        if not self.live:
            return []
        if now >= self.deadline_at:
            message = "the request's deadline passed"
            return self._on_stop(Stop(label="deadline_expired", message=message, retryable=False))
        if self.pulling and now >= self.lease_until:
            return self._switch("prefill was silent for one lease", tell_peer=True)
        if self.pulling and now >= self.settle_until and not self.num_reading:
            return self._switch("a page or the first token never came", tell_peer=True)
        if self.pulling and now >= self.settle_until:
            self._progressed(now)
        if self.pulling and now >= self.granted_again_at:
            return self._grant(now)
        return []
