"""What the decode role knows of one key besides its session: the call, its pages, the ledger's figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.reserve import Reservation
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.decode_events import DEnd, DEvent
from kvtransfer.session.guard import RoleContext
from pdserve.messages import Ended, Finish, Reserve
from pdserve.types import Ledger, TransferStats, Usage


@dataclass(slots=True, kw_only=True)
class Entry:
    """One key: its session, the router's call, its pages, and what the ledger needs."""

    session: DecodeSession
    call: Reserve
    held: Reservation
    ticket_until: float
    accepted_at: float
    finish: Finish | None = None
    local_start: int | None = None
    local_hits: int = 0
    num_retractions: int = 0
    num_tokens: int = 0
    moved_pages: int = 0
    path: str = ""
    resent: int = 0
    announced_at: float = 0.0
    running_at: float = 0.0
    missed: int = 0
    todo: list[DEvent] = field(default_factory=list)

    def is_peer(self, peer: str, incarnation: int) -> bool:
        """Whether this is the prefill worker that the key is pulled from."""
        ref = self.call.prefill
        return ref is not None and ref.worker_id == peer and ref.incarnation == incarnation

    def ended(self, end: DEnd, ctx: RoleContext, page_bytes: int, now: float) -> Ended:
        """The terminal status for the router."""
        ledger = self.ledger(ctx, page_bytes, now)
        cached = max(ledger.decode_hit_tokens, ledger.prefill_cached_tokens)
        num_prompt = len(self.call.token_ids) - self.call.num_forced
        usage = Usage(
            prompt_tokens=num_prompt, cached_tokens=min(cached, num_prompt),
            completion_tokens=self.call.num_forced + self.num_tokens,
        )  # fmt: skip
        return Ended(
            key=self.session.key, finish=end.finish, error_label=end.label, error_message=end.message,
            retryable=end.retryable, usage=usage, ledger=ledger,
        )  # fmt: skip

    def ledger(self, ctx: RoleContext, page_bytes: int, now: float) -> Ledger:
        """What both sides did for this request, so far."""
        base = self.finish.ledger if self.finish else Ledger()
        held = self.held
        hits = held.hit_pages * ctx.page_size
        local = 0
        if self.local_start is not None:
            hits = max(hits, self.local_hits)
            local = len(self.call.token_ids) - max(self.local_start, self.local_hits)
        started = self.announced_at or self.running_at
        moved = TransferStats(
            path=self.path, pages=self.moved_pages,
            bytes=self.moved_pages * page_bytes, hit_pages=held.hit_pages, resent_pages=self.resent,
        )  # fmt: skip
        return Ledger(
            prefill_worker=base.prefill_worker, decode_worker=ctx.worker_id,
            prefill_computed_tokens=base.prefill_computed_tokens,
            prefill_cached_tokens=base.prefill_cached_tokens,
            decode_computed_prompt_tokens=local, decode_hit_tokens=hits,
            prefill_queue_s=base.prefill_queue_s, prefill_compute_s=base.prefill_compute_s,
            transfer_s=max(0.0, self.running_at - started) if self.running_at else 0.0,
            decode_s=now - self.running_at if self.running_at else 0.0,
            num_retractions=self.num_retractions + base.num_retractions, transfer=moved,
        )  # fmt: skip
