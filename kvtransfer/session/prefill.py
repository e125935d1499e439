"""The prefill side of one transfer: rows P1-P11 of protocol.md §9, as a pure state machine.

What lives here: states, leases, credits, acks, resends and when holders are to be taken or dropped.
What does not: pages, the scheduler and the network; `prefill_worker.loop` carries the effects out.
The state is changed in place by `step`, which returns the effects; nothing else may change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvtransfer.digest import digest_of_digests
from kvtransfer.session.guard import finish_record
from kvtransfer.session.prefill_events import (
    ComputeQuiet,
    Digested,
    FirstToken,
    PDone,
    PDrop,
    PDropRequest,
    PEffect,
    PEvent,
    PHold,
    PQueue,
    PreemptedEvent,
    PrefillHalf,
    PRehash,
    PReport,
    PSend,
    PStopCompute,
    PUnpublish,
    Renewed,
    Scheduled,
    Sealed,
    Stop,
    Tick,
)
from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from pdserve.types import Key, PageName

MAX_RESENDS = 2


class PState(StrEnum):
    """States of the prefill side."""

    HALF = "half"
    QUEUED = "queued"
    COMPUTE = "compute"
    SENT = "sent"
    CLOSING = "closing"
    DONE = "done"


@dataclass(slots=True, kw_only=True)
class _Page:
    """What is known of one page. rehashing: its bytes are being digested again."""

    sealed: Sealed
    digest: bytes | None = None
    announced: bool = False
    acked: bool = False
    held: bool = False
    resends: int = 0
    rehashing: bool = False


@dataclass(slots=True, kw_only=True)
class PrefillSession:
    """State of one key on the prefill side. lease_s is L; times are on the local monotonic clock.

    ready: held and digested, not announced yet. unproven: not held, and to be digested again.
    """

    key: Key
    lease_s: float
    state: PState = PState.HALF
    has_request: bool = False
    grant: Grant | None = None
    want: set[int] = field(default_factory=set)
    credit: int = 0
    pages: dict[int, _Page] = field(default_factory=dict)
    num_announced: int = 0
    ready: set[int] = field(default_factory=set)
    unproven: set[int] = field(default_factory=set)
    first: FirstToken | None = None
    computing: bool = False
    lease_until: float = 0.0
    deadline_at: float = float("inf")
    repeat_at: float = float("inf")
    outcome: Outcome = Outcome.UNKNOWN

    # -- what drivers may ask ---------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether this key still needs renewals and can make progress."""
        return self.state in (PState.HALF, PState.QUEUED, PState.COMPUTE, PState.SENT)

    @property
    def waits_for_renewal(self) -> bool:
        """Whether decode must know this key. Once all is sent, Finish itself asks for it, and a Commit that
        was lost is no lost key."""
        return self.state in (PState.QUEUED, PState.COMPUTE)

    def next_timer(self) -> float:
        """When Tick is due next; infinity if never."""
        if not self.live:
            return float("inf")
        return min(self.lease_until, self.deadline_at, self.repeat_at)

    def uses(self, page: PageName) -> bool:
        """Whether this request's prompt has that page, sent or not."""
        return self.live and any(p.sealed.page == page for p in self.pages.values())

    @property
    def proving(self) -> bool:
        """Whether a cached page that decode does not ask for is still to be shown unchanged. Decode can not
        see that one's bytes, only pages that were computed from it."""
        return bool(self.unproven)

    # -- the table --------------------------------------------------------------------------------------

    def step(self, event: PEvent, now: float) -> list[PEffect]:
        """Applies one event. One that means nothing in this state (a duplicate, a late one) has no effect."""
        match event:
            case PrefillHalf():
                return self._on_request(event, now)
            case Grant():
                return self._on_grant(event, now)
            case Scheduled():
                return self._on_scheduled()
            case Sealed():
                return self._on_sealed(event)
            case Digested():
                return self._on_digested(event, now)
            case PreemptedEvent():
                return self._on_preempted()
            case FirstToken():
                return self._on_first_token(event, now)
            case Ack():
                return self._on_ack(event, now)
            case Nack():
                return self._on_nack(event, now)
            case Commit():
                return self._on_commit()
            case Renewed():
                self.lease_until = now + self.lease_s
                return []
            case Abort():
                return self._stop(event.outcome, event.detail, tell_peer=False)
            case Stop():
                return self._stop(event.outcome, event.detail, tell_peer=event.tell_peer)
            case ComputeQuiet():
                return self._on_quiet()
            case Tick():
                return self._on_tick(now)

    def _on_request(self, event: PrefillHalf, now: float) -> list[PEffect]:
        if self.has_request or not self.live:
            return []
        self.has_request = True
        self.deadline_at = event.deadline_at
        return self._park_or_queue(now)

    def _on_grant(self, event: Grant, now: float) -> list[PEffect]:
        if not self.live:
            return []
        self.lease_until = now + self.lease_s
        self.credit = max(self.credit, event.credit)
        grown = set(event.want) - self.want
        self.want |= grown
        if self.grant is None:
            self.grant = event
            return self._park_or_queue(now)
        held = [e for i in sorted(grown & self.pages.keys()) for e in self._want_page(i)]
        return held + self._announce(now)

    def _park_or_queue(self, now: float) -> list[PEffect]:
        self.lease_until = now + self.lease_s
        if self.state is not PState.HALF or not self.has_request or self.grant is None:
            return []
        self.state = PState.QUEUED
        self.computing = True
        return [PQueue()]

    def _on_scheduled(self) -> list[PEffect]:
        if self.state is PState.QUEUED:
            self.state = PState.COMPUTE
        return []

    def _on_preempted(self) -> list[PEffect]:
        if self.state is PState.COMPUTE and self.first is None:
            self.state = PState.QUEUED
        return []

    def _on_sealed(self, event: Sealed) -> list[PEffect]:
        if self.state is not PState.COMPUTE:
            return []
        known = self.pages.get(event.index)
        if known is not None and (known.held or known.acked or known.announced):
            return []
        self.unproven.discard(event.index)
        page = self.pages[event.index] = _Page(sealed=event, digest=event.digest)
        if event.index in self.want:
            return self._want_page(event.index)
        page.rehashing = event.digest is not None
        if page.rehashing:
            self.unproven.add(event.index)
        return [PRehash(index=event.index, page=event.page, valid_rows=event.valid_rows)]

    def _want_page(self, index: int) -> list[PEffect]:
        page = self.pages[index]
        if index not in self.want or page.held or page.acked:
            return []
        page.held = True
        self.unproven.discard(index)
        return [PHold(index=index, page=page.sealed.page, valid_rows=page.sealed.valid_rows)]

    def _on_digested(self, event: Digested, now: float) -> list[PEffect]:
        page = self.pages.get(event.index)
        if page is None or not self.live or page.sealed.page != event.page:
            return []
        if page.digest is not None and event.digest != page.digest:
            stop = self._stop(Outcome.SOURCE_CORRUPT, "page bytes changed at the source", tell_peer=True)
            return [PUnpublish(page=page.sealed.page), *stop]
        again = page.rehashing and page.held and page.announced
        page.rehashing, page.digest = False, event.digest
        self.unproven.discard(event.index)
        if page.held and not page.announced:
            self.ready.add(event.index)
        out: list[PEffect] = [PSend(message=self._announcement(event.index, page))] if again else []
        if self.first is not None and not self.proving:
            out.append(PDropRequest())
        return out + self._announce(now)

    def _announcement(self, index: int, page: _Page) -> Announce:
        assert page.digest is not None
        return Announce(
            key=self.key, index=index, page=page.sealed.page, valid_rows=page.sealed.valid_rows,
            content_key=page.sealed.content_key, digest=page.digest,
        )  # fmt: skip

    def _announce(self, now: float) -> list[PEffect]:
        """Announces digested pages in order within the credit; then Finish, once all are out."""
        if self.proving:
            return []
        out: list[PEffect] = []
        for index in sorted(self.ready)[: max(0, self.credit - self.num_announced)]:
            page = self.pages[index]
            page.announced = True
            self.ready.discard(index)
            self.num_announced += 1
            self.repeat_at = min(self.repeat_at, now + self.lease_s / 4)
            out.append(PSend(message=self._announcement(index, page)))
        return out + self._maybe_finish(now)

    def _maybe_finish(self, now: float) -> list[PEffect]:
        if self.state is not PState.COMPUTE or self.first is None or self.proving:
            return []
        if self.num_announced < len(self.want):  # what is announced is wanted
            return []
        self.state = PState.SENT
        self.repeat_at = now + self.lease_s / 4
        return self._send_finish()

    def _repeat(self, now: float) -> list[PEffect]:
        """Whatever decode has not answered may have been lost: announce it again, and Finish."""
        open_pages = [i for i, p in sorted(self.pages.items()) if p.announced and p.held and not p.rehashing]
        out: list[PEffect] = [PSend(message=self._announcement(i, self.pages[i])) for i in open_pages]
        if self.state is PState.SENT:
            out += self._send_finish()
        self.repeat_at = now + self.lease_s / 4 if out else float("inf")
        return out

    def _send_finish(self) -> list[PEffect]:
        assert self.first is not None
        announced = [(i, p.digest) for i, p in sorted(self.pages.items()) if p.announced and p.digest]
        message = Finish(
            key=self.key, index=self.first.index, token_id=self.first.token_id,
            next_counter=self.first.index + 1, finish=self.first.finish,
            num_announced=len(announced), digest_of_digests=b"", logprob=self.first.logprob,
        )  # fmt: skip
        digest = digest_of_digests(announced, finish_record(message))
        return [PSend(message=replace(message, digest_of_digests=digest))]

    def _on_first_token(self, event: FirstToken, now: float) -> list[PEffect]:
        if self.state is not PState.COMPUTE or self.first is not None:
            return []
        self.first = event
        self.computing = False
        return [] if self.proving else [PDropRequest(), *self._maybe_finish(now)]

    def _on_ack(self, event: Ack, now: float) -> list[PEffect]:
        page = self.pages.get(event.index)
        if not self.live or page is None or not page.announced:
            return []
        self.lease_until = now + self.lease_s
        page.acked = True
        page.rehashing = False  # it arrived whole: a check under way proves nothing more, and may never end
        return self._drop(event.index)

    def _drop(self, index: int) -> list[PEffect]:
        page = self.pages[index]
        if not page.held:
            return []
        page.held = False
        if page.rehashing:
            self.unproven.add(index)
        return [PDrop(index=index, page=page.sealed.page)]

    def _on_nack(self, event: Nack, now: float) -> list[PEffect]:
        page = self.pages.get(event.index)
        if not self.live or page is None or not (page.announced and page.held) or page.rehashing:
            return []
        self.lease_until = now + self.lease_s
        page.resends += 1
        if page.resends > MAX_RESENDS:
            return self._stop(Outcome.SOURCE_CORRUPT, "page could not be moved intact", tell_peer=True)
        page.rehashing = True
        return [PRehash(index=event.index, page=page.sealed.page, valid_rows=page.sealed.valid_rows)]

    def _on_commit(self) -> list[PEffect]:
        if self.state is not PState.SENT:
            return []
        return self._close(Outcome.COMPLETE, "")

    def _close(self, outcome: Outcome, detail: str) -> list[PEffect]:
        self.state = PState.CLOSING
        self.outcome = outcome
        drops = [e for i in sorted(self.pages) for e in self._drop(i)]
        out: list[PEffect] = [*drops, PReport(outcome=outcome, detail=detail)]
        return out + ([] if self.computing else self._on_quiet())

    def _stop(self, outcome: Outcome, detail: str, *, tell_peer: bool) -> list[PEffect]:
        if not self.live:
            return []
        out: list[PEffect] = [PStopCompute()] if self.computing else []
        if tell_peer and self.grant is not None:
            out.append(PSend(message=Abort(key=self.key, outcome=outcome, detail=detail)))
        return out + self._close(outcome, detail)

    def _on_quiet(self) -> list[PEffect]:
        self.computing = False
        if self.state is not PState.CLOSING:
            return []
        self.state = PState.DONE
        return [PDropRequest(), PDone(outcome=self.outcome)]

    def _on_tick(self, now: float) -> list[PEffect]:
        if not self.live:
            return []
        if now >= self.deadline_at:
            return self._stop(Outcome.EXPIRED, "the request's deadline passed", tell_peer=True)
        if now >= self.lease_until:
            never = self.state is PState.HALF
            outcome = Outcome.NEVER_STARTED if never else Outcome.EXPIRED
            return self._stop(outcome, "the other half never came" if never else "lease over", tell_peer=True)
        return self._repeat(now) if now >= self.repeat_at else []
