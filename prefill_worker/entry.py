"""What the prefill role knows of one key besides its session: the router's call and the ledger's figures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtransfer.session.guard import RoleContext, cache_salt
from kvtransfer.session.prefill import PrefillSession, PState
from kvtransfer.session.prefill_events import PEvent
from kvtransfer.stamps import ComputeLog
from pdserve.messages import Announce, Finish, PrefillRequest, Report, TransferMessage
from pdserve.sched.plan import PageReady, SeqKind, SeqSpec, TokenSampled
from pdserve.types import Key, Ledger

PREFIX = "P:"


def seq_id_of(key: Key) -> str:
    """The scheduler's name of a key's sequence."""
    return f"{PREFIX}{key}"


@dataclass(slots=True, kw_only=True)
class Entry:
    """One key: its session, the router's call once it came, and what the ledger needs."""

    session: PrefillSession
    peer: str
    peer_incarnation: int
    ticket_until: float
    request_hash: bytes
    call: PrefillRequest | None = None
    keys: tuple[bytes, ...] = ()
    token: TokenSampled | None = None
    hit_tokens: int = 0
    computed_rows: int = 0
    num_preempted: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0
    done_at: float = 0.0
    compute: ComputeLog = field(default_factory=ComputeLog)
    sealed_s: dict[int, float] = field(default_factory=dict)
    missed: int = 0
    todo: list[PEvent] = field(default_factory=list)

    def is_peer(self, peer: str, incarnation: int) -> bool:
        """Whether this is the decode worker that the key was granted by."""
        return self.peer == peer and self.peer_incarnation == incarnation

    def sealed(self, event: PageReady, now: float) -> None:
        """A page of the prompt is there, computed or found."""
        self.computed_rows += 0 if event.cached else event.valid_rows
        self.sealed_s[event.index] = now if event.cached else self.compute.ended_at or now

    def num_pages(self, ctx: RoleContext) -> int:
        """Pages that its prompt takes, as far as it is known."""
        return ctx.num_pages(len(self.call.token_ids)) if self.call is not None else 0

    def stamped(self, message: TransferMessage, worker_id: str, now: float) -> TransferMessage:
        """A message to decode with what the ledger wants to know of it."""
        match message:
            case Finish():
                return replace(message, ledger=self.ledger(worker_id, now))
            case Announce():
                return replace(message, sealed_s=self.sealed_s.get(message.index, now))
            case _:
                return message

    def doing(self) -> str:
        """What this key does or waits for here, in words."""
        session, total = self.session, len(self.call.token_ids) if self.call else 0
        match session.state:
            case PState.HALF:
                return "waits for decode's grant" if session.has_request else "waits for the router's half"
            case PState.QUEUED:
                return "waits for its turn to be computed"
            case PState.COMPUTE:
                return f"has computed {self.hit_tokens + self.compute.rows} of {total} tokens"
            case PState.SENT:
                open_pages = sum(page.announced and not page.acked for page in session.pages.values())
                return f"waits for decode to commit, {open_pages} pages are not acknowledged"
            case _:
                return "lets go of its pages"

    def report(self, worker_id: str, now: float) -> Report:
        """For the router's Explain."""
        return Report(doing=self.doing(), ledger=self.ledger(worker_id, now))

    def ledger(self, worker_id: str, now: float) -> Ledger:
        """What this side did so far."""
        total = len(self.call.token_ids) if self.call else 0
        return Ledger(
            prefill_worker=worker_id,
            prefill_computed_tokens=min(self.computed_rows, total - self.hit_tokens),
            prefill_cached_tokens=self.hit_tokens,
            prefill_queue_s=max(0.0, self.started_at - self.queued_at),
            prefill_compute_s=max(0.0, self.done_at - self.started_at),
            num_retractions=self.num_preempted,
            spans=tuple(self.compute.spans(worker_id, now)),
        )


def sequence(call: PrefillRequest, seq_id: str, queued_at: float) -> SeqSpec:
    """The prompt as the step scheduler takes it."""
    return SeqSpec(
        seq_id=seq_id, kind=SeqKind.PREFILL_ONLY, token_ids=call.token_ids,
        num_prompt=len(call.token_ids) - call.num_forced, sampling=call.sampling, arrival=queued_at,
        use_prefix_cache=call.use_prefix_cache, cache_salt=cache_salt(call.tenant, call.cache_salt),
        priority=call.priority,
    )  # fmt: skip
