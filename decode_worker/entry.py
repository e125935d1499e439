"""What the decode role knows of one key besides its session: the call, its pages, the ledger's figures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from decode_worker.reserve import Kept, Reservation
from decode_worker.spread import Spread
from kvtransfer.session.decode import DecodeSession, DState
from kvtransfer.session.decode_events import DEnd, DEvent
from kvtransfer.session.guard import RoleContext
from kvtransfer.stamps import ComputeLog, PageLog
from pdserve.kvcache.allocator import Holder
from pdserve.messages import Ended, Finish, Reserve, Token
from pdserve.sched.plan import PageReady, SeqStep
from pdserve.types import Ledger, Phase, Span, TransferStats, Usage


@dataclass(slots=True, kw_only=True)
class PromptWork:
    """Prompt rows that this worker computes: those of a local prompt, and again those of a retracted request,
    as far as the prefix cache does not give them back.

    first_hits: tokens that the scheduler found in the cache when a local prompt started. local: the prompt is
    (in part) computed here, and not only again.
    """

    num_tokens: int
    page_size: int
    first_hits: int = 0
    local: bool = False
    _finished: int = 0
    _start: int = 0
    _now: int = 0
    _open: bool = False

    @property
    def rows(self) -> int:
        return self._finished + self._now

    def begin(self, known: int) -> None:
        """A prompt of which `known` rows are there is to be computed."""
        self._start, self._open, self.local = known, True, True

    def started(self, hit_tokens: int) -> None:
        """It starts, or starts again, after these tokens from the cache."""
        if self._open and not self._finished:
            self.first_hits = max(self.first_hits, hit_tokens)
        self._start = max(self._start, hit_tokens)

    def sealed(self, page: PageReady) -> None:
        """A page is full; while the prompt is computed these are its rows."""
        if self._open and not page.cached:
            end = min(self.num_tokens, page.index * self.page_size + page.valid_rows)
            self._now = max(self._now, end - self._start)

    def done(self) -> None:
        """All rows that were there at the start are computed; those after the prompt do not count."""
        if self._open:
            self._finished += max(0, self.num_tokens - self._start)
            self._now, self._open = 0, False

    def retracted(self) -> None:
        """Its pages are gone, and so is what was computed into them."""
        self._finished += self._now
        self._start = self._now = 0
        self._open = True


@dataclass(slots=True, kw_only=True)
class Entry:
    """One key: its session, the router's call, its pages, and what the ledger needs."""

    session: DecodeSession
    call: Reserve
    held: Reservation
    ticket_until: float
    accepted_at: float
    arrival: float
    computing: PromptWork
    finish: Finish | None = None
    num_retractions: int = 0
    moved_pages: int = 0
    path: str = ""
    resent: int = 0
    announced_at: float = 0.0
    running_at: float = 0.0
    missed: int = 0
    compute: ComputeLog = field(default_factory=ComputeLog)
    pages: PageLog = field(default_factory=PageLog)
    finish_at: float | None = None
    emitted_at: float | None = None
    transferring: bool = False
    queue_measured: bool = False
    first_step: tuple[float, float] | None = None
    tokens: list[Token] = field(default_factory=list)
    todo: list[DEvent] = field(default_factory=list)
    spread: Spread = field(init=False)

    def __post_init__(self) -> None:
        self.spread = self.held.spread

    def is_peer(self, peer: str, incarnation: int) -> bool:
        """Whether this is the prefill worker that the key is pulled from."""
        ref = self.call.prefill
        return ref is not None and ref.worker_id == peer and ref.incarnation == incarnation

    def finished(self, finish: Finish, now: float) -> None:
        """Finish arrived, perhaps again."""
        self.finish = finish
        self.finish_at = now if self.finish_at is None else self.finish_at

    def stepped(self, step: SeqStep, began: float, ended: float) -> None:
        """Our engine computed for this request: a chunk of its prompt, or the step after the first token."""
        if self.emitted_at is None:
            self.compute.chunk(began, ended, len(step.token_ids))
        elif self.first_step is None:
            self.first_step = (began, ended)

    def kept(self, holder: Holder) -> Kept | None:
        """What a higher key may take over: only a transfer under way has what is not found as prefix hits.

        Of the verified pages those without a gap before them: what lies behind a page that never arrived
        intact may have been computed from it, and then its digest is right and its content is not.
        """
        if self.session.state is not DState.PULL:
            return None
        held, spread = self.held, self.spread
        reading = {page for index in self.session.reading for page in spread.lacking(index)}
        pages = {i: p for i, p in enumerate(held.pages) if i >= held.hit_pages and i not in reading}
        proven = range(held.hit_pages, spread.known_pages(self.session.verified_prefix))
        verified = {} if held.foreign else {i: held.keys[i] for i in proven}
        return Kept(holder=holder, pages=pages, verified=verified)

    def doing(self) -> str:
        """What this key does or waits for here, in words."""
        session = self.session
        match session.state:
            case DState.PULL:
                verified = sum(page.verified for page in session.pages.values())
                late = "" if self.finish_at is not None else ", the first token has not come"
                return f"has {verified} of {len(session.want)} pages, {session.num_reading} under way{late}"
            case DState.LOCAL:
                return f"has computed {self.compute.rows} tokens of {len(self.call.token_ids)}"
            case DState.RUNNING:
                return f"has made {len(self.tokens)} tokens"
            case _:
                return "lets go of its pages"

    def ended(self, end: DEnd, ctx: RoleContext, page_bytes: int, now: float) -> Ended:
        """The terminal status for the router."""
        ledger = self.ledger(ctx, page_bytes, now)
        cached = max(ledger.decode_hit_tokens, ledger.prefill_cached_tokens)
        num_prompt = len(self.call.token_ids) - self.call.num_forced
        usage = Usage(
            prompt_tokens=num_prompt, cached_tokens=min(cached, num_prompt),
            completion_tokens=self.call.num_forced + len(self.tokens),
        )  # fmt: skip
        return Ended(
            key=self.session.key, finish=end.finish, error_label=end.label, error_message=end.message,
            retryable=end.retryable, usage=usage, ledger=ledger,
        )  # fmt: skip

    def ledger(self, ctx: RoleContext, page_bytes: int, now: float) -> Ledger:
        """What both sides did for this request, so far."""
        base = self.finish.ledger if self.finish else Ledger()
        held = self.held
        hits = max(held.hit_pages * ctx.page_size, self.computing.first_hits)
        started = self.announced_at or self.running_at
        moved = TransferStats(
            path=self.path, pages=self.moved_pages,
            bytes=self.moved_pages * (held.origin.page_bytes or page_bytes),
            hit_pages=held.hit_pages, resent_pages=self.resent,
        )  # fmt: skip
        return Ledger(
            prefill_worker=base.prefill_worker, decode_worker=ctx.worker_id,
            prefill_computed_tokens=base.prefill_computed_tokens,
            prefill_cached_tokens=base.prefill_cached_tokens,
            decode_computed_prompt_tokens=self.computing.rows, decode_hit_tokens=hits,
            prefill_queue_s=base.prefill_queue_s, prefill_compute_s=base.prefill_compute_s,
            transfer_s=max(0.0, self.running_at - started) if self.running_at else 0.0,
            decode_s=now - self.running_at if self.running_at else 0.0,
            num_retractions=self.num_retractions + base.num_retractions, transfer=moved,
            spans=tuple(self._spans(ctx.worker_id, base, now)),
        )  # fmt: skip

    def _spans(self, clock: str, base: Ledger, now: float) -> list[Span]:
        """Everybody's stretches so far, by the clocks of those who stamped them."""
        source = self.call.prefill.worker_id if self.call.prefill is not None else ""
        local = self.computing.local
        out = [_span(Phase.DISPATCH, clock, self.accepted_at, self.accepted_at)]
        out += [replace(s, on_path=s.on_path and not local) for s in base.spans]
        out += self.pages.spans(clock, source) + self.compute.spans(clock, now)
        if not local:
            out += self._tail(clock, source, base)
        done_at = self.compute.ended_at if local else self._handed_over_at
        if self.emitted_at is not None and done_at is not None:
            out.append(_span(Phase.ADMIT, clock, done_at, self.emitted_at, on_path=True))
        if self.first_step is not None:
            out.append(_span(Phase.FIRST_STEP, clock, *self.first_step))
        return out

    @property
    def _handed_over_at(self) -> float | None:
        """When the last page was verified and Finish was there, whichever came later."""
        verified = self.pages.verified_at
        return self.finish_at if verified is None else max(verified, self.finish_at or verified)

    def _tail(self, clock: str, source: str, base: Ledger) -> list[Span]:
        """The way of what came last: the last page's, or that of Finish when it came after it."""
        verified = self.pages.verified_at
        if self.finish_at is None or (verified is not None and verified >= self.finish_at):
            return self.pages.path(clock, source)
        ends = [s.end_s for s in base.spans if s.phase is Phase.COMPUTE]
        if not ends:
            return []
        return [_span(Phase.ANNOUNCE, clock, max(ends), self.finish_at, begin_clock=source, on_path=True)]


def _span(
    phase: Phase, clock: str, begin: float, end: float, *, begin_clock: str = "", on_path: bool = False
) -> Span:
    return Span(
        phase=phase, begin_s=begin, end_s=end, begin_clock=begin_clock or clock, end_clock=clock,
        on_path=on_path,
    )  # fmt: skip
