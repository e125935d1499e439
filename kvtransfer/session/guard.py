"""What both sides share around their sessions: facts about this worker, tombstones, ticket checks. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvtransfer import ticket
from pdserve.errors import PermissionRefused
from pdserve.messages import Finish, Grant, Outcome, PrefillRequest, Refusal, Reserve
from pdserve.types import HandoverMode, Key, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """Facts about this worker that do not change within an incarnation.

    lease_s: L. local_prefill_threshold: uncached prompt tokens below which decode prefills by itself.
    floor_pages: pages that reservations leave free. growth_tokens: completion tokens a reservation counts
    on. max_num_seqs: live requests at most. secret: the fleet's ticket key. decode_pace_s: see WorkerConfig.
    host_id: equal for workers that share a machine. credit_pages: pages that prefill may have announced
    beyond those that decode has verified. max_gap_s: a longer silence of our own ends this incarnation; 0: L.
    num_ranks: of this replica (protocol.md §8); this is its leader. layout: how its pages are cut, as text
    (`kvtransfer.plan.record`); empty where that can not be described. kv_mixing: see WorkerConfig.
    """

    worker_id: str
    incarnation: int
    page_size: int
    max_context: int
    model: str
    numerics: str
    secret: bytes
    lease_s: float = 10.0
    local_prefill_threshold: int = 0
    floor_pages: int = 0
    growth_tokens: int = 64
    max_num_seqs: int = 64
    decode_pace_s: float = 0.0
    host_id: str = ""
    credit_pages: int = 256
    max_gap_s: float = 0.0
    num_ranks: int = 1
    layout: str = ""
    kv_mixing: str = "strict"

    @property
    def gap_s(self) -> float:
        """The longest silence of our own after which we may still speak (protocol.md §3)."""
        return self.max_gap_s or self.lease_s

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)


LONGEST_TICKET_S = 660.0
"""No ticket lives longer: the longest deadline (security.md §6) and some leases."""


def cache_salt(tenant: str, own: str = "") -> bytes:
    """The tenant's prefix-cache salt; the tenant comes from the authenticator, never from the client. own: of
    one request whose pages only its own choices share; the router made it up."""
    return tenant.encode() + (b"\0" + own.encode() if own else b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """The recorded answer for a request's highest key so far."""

    key: Key
    outcome: Outcome
    until: float


class Tombstones:
    """What became of keys that ended here, until their tickets expire (protocol.md §3)."""

    def __init__(self) -> None:
        self._by_request: dict[str, Tombstone] = {}
        self._due: list[tuple[float, str]] = []
        """Heap of (until, request): one for each time that a stone was put."""

    def __len__(self) -> int:
        return len(self._by_request)

    def put(self, key: Key, outcome: Outcome, until: float) -> None:
        """Records an outcome; a lower key never replaces a higher one."""
        old = self._by_request.get(key.request_id)
        if old is not None and old.key > key:
            return
        until = max(until, old.until if old else until)
        self._by_request[key.request_id] = Tombstone(key=key, outcome=outcome, until=until)
        heapq.heappush(self._due, (until, key.request_id))

    def answer(self, key: Key) -> Outcome | None:
        """The recorded answer if this key is at or below the highest one that ended, else None."""
        stone = self._by_request.get(key.request_id)
        if stone is None or key > stone.key:
            return None
        return stone.outcome if key == stone.key else Outcome.SUPERSEDED

    def expire(self, now: float) -> None:
        """Forgets those whose tickets are refused by now."""
        while self._due and now >= self._due[0][0]:
            _, request_id = heapq.heappop(self._due)
            stone = self._by_request.get(request_id)
            if stone is not None and now >= stone.until:
                del self._by_request[request_id]


def check_call(
    ctx: RoleContext, call: Reserve | PrefillRequest, now: float
) -> tuple[Refusal, str] | ticket.TicketFacts:
    """Guard 1 of protocol.md §9: receiver incarnation and ticket. The facts, or why it is refused."""
    if call.receiver_incarnation != ctx.incarnation:
        return Refusal.STALE_INCARNATION, "this worker was restarted since"
    if isinstance(call, Reserve):
        side, emitter, mode = ticket.Side.DECODE, ctx.worker_id, call.mode
    else:
        side, emitter, mode = ticket.Side.PREFILL, call.decode.worker_id, HandoverMode.DISAGGREGATED
    try:
        facts = ticket.verify(
            ctx.secret, call.ticket, now=now, side=side, key=call.key, incarnation=ctx.incarnation,
            emitter=emitter, tenant=call.tenant, mode=mode,
            request_hash=ticket.request_hash(call.token_ids, call.sampling, call.cache_salt),
        )  # fmt: skip
    except (PermissionRefused, ValueError) as error:
        return Refusal.BAD_TICKET, str(error)
    problem = _other_side(call, facts)
    if problem is None and ctx.num_pages(len(call.token_ids)) > facts.page_budget:
        problem = "the request needs more pages than its ticket allows"
    return facts if problem is None else (Refusal.BAD_TICKET, problem)


def check_grant(
    ctx: RoleContext, peer: str, incarnation: int, grant: Grant, now: float
) -> ticket.TicketFacts | None:
    """Guard 1 for decode's half: the ticket is for this key, for us, and for the worker that shows it."""
    try:
        facts = ticket.verify(
            ctx.secret, grant.ticket, now=now, side=ticket.Side.PREFILL, key=grant.key,
            incarnation=ctx.incarnation, emitter=peer,
        )  # fmt: skip
    except PermissionRefused:
        return None
    return facts if facts.decode_incarnation == incarnation else None


def _other_side(call: Reserve | PrefillRequest, facts: ticket.TicketFacts) -> str | None:
    """Whether the worker on the other side is the one the ticket names."""
    if isinstance(call, PrefillRequest):
        same = facts.decode_incarnation == call.decode.incarnation
    else:
        same = call.prefill is None or facts.prefill_incarnation == call.prefill.incarnation
    return None if same else "the ticket names another worker for the other side"


def finish_record(finish: Finish) -> bytes:
    """What a Finish says besides its pages, for the digest it carries: a first token that changed on the way
    is refused like a page that did, and so is its log-probability."""
    reason = finish.finish.value if finish.finish is not None else ""
    fields = (finish.key, finish.index, finish.token_id, finish.next_counter, reason, finish.num_announced)
    logprob = () if finish.logprob is None else (finish.logprob,)
    return "|".join(map(str, (*fields, *logprob))).encode()


def sampling_room(num_prompt: int, sampling: SamplingParams, max_context: int) -> int:
    """Completion tokens a request may still make within the context."""
    return min(sampling.max_tokens, max_context - num_prompt)
