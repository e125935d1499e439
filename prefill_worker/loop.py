"""The prefill role of a worker, as pure code: carries out the effects of its sessions on pages and scheduler.

What lives here: which session an event belongs to, page holders of transfers, content keys and digests by
page. What does not: the state table (`kvtransfer.session.prefill`), sockets, tensors and threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer import measures, ticket
from kvtransfer.effects import AnswerPrefill, Count, Effect
from kvtransfer.session import prefill_events as table
from kvtransfer.session.guard import (
    LONGEST_TICKET_S,
    RoleContext,
    Tombstones,
    cache_salt,
    check_call,
    check_grant,
)
from kvtransfer.session.prefill import PrefillSession
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import page_keys
from pdserve.messages import (
    Abort,
    Ack,
    Commit,
    Grant,
    Nack,
    Outcome,
    Prefilled,
    PrefillRequest,
    Refusal,
    Renew,
    Report,
    TransferMessage,
)
from pdserve.sched import plan as seq
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import Key, PageName
from prefill_worker.entry import PREFIX, Entry, seq_id_of, sequence
from prefill_worker.holds import Holds
from prefill_worker.replies import LOST, MISMATCH, compute, mismatch, never_started, refused, to_peer


class PrefillRole:
    """All live prefill sessions of one worker. Called by the control thread only."""

    def __init__(self, ctx: RoleContext, pages: PageManager, scheduler: StepScheduler) -> None:
        self._ctx = ctx
        self._pages = pages
        self._scheduler = scheduler
        self._live: dict[str, Entry] = {}  # newest key of each request
        self._entries: dict[Key, Entry] = {}  # those and superseded ones that still compute
        self._by_seq: dict[str, Entry] = {}
        self.stones = Tombstones()
        self._holds = Holds(pages)
        self.draining = False

    @property
    def num_live(self) -> int:
        return len(self._entries)

    @property
    def num_active(self) -> int:
        """Keys that can still make progress."""
        return sum(entry.session.live for entry in self._entries.values())

    @property
    def leases(self) -> tuple[int, int]:
        """Keys whose other half must be heard of within a lease, and pages that may still be announced."""
        live = [entry.session for entry in self._entries.values() if entry.session.live]
        return len(live), sum(max(0, one.credit - one.num_announced) for one in live)

    @property
    def pace_s(self) -> float:
        """Prompts are computed as fast as can be."""
        return 0.0

    def owns(self, seq_id: str) -> bool:
        """Whether a scheduler event is this role's."""
        return seq_id.startswith(PREFIX)

    def next_timer(self) -> float:
        return min((e.session.next_timer() for e in self._entries.values()), default=float("inf"))

    def authorise(self, ticket_bytes: bytes, key: Key, now: float) -> bool:
        """Whether a data-plane peer that shows this ticket may read pages of this key."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        grant = entry.session.grant
        return grant is not None and grant.ticket == ticket_bytes and now < entry.ticket_until

    # -- inputs -----------------------------------------------------------------------------------------

    def prefill(self, call: PrefillRequest, now: float) -> list[Effect]:
        """The router's half. Always answered: by Refused now, or by Prefilled later."""
        facts = check_call(self._ctx, call, now)
        if not isinstance(facts, ticket.TicketFacts):
            return [refused(call.key, *facts)]
        recorded = self.stones.answer(call.key)
        if recorded is not None:
            return [AnswerPrefill(key=call.key, message=Prefilled(key=call.key, outcome=recorded))]
        entry = self._live.get(call.key.request_id)
        if entry is not None and entry.session.key > call.key:
            return [refused(call.key, Refusal.OUTDATED_KEY, "a newer try is running")]
        out = self._supersede(call.key, now)
        entry = self._entries.get(call.key)
        if (entry is None or entry.call is None) and (refusal := self._no_room(call, entry)):
            return [*out, *(self._run(entry, never_started(), now) if entry is not None else []), refusal]
        if entry is None:
            entry = self._new(call.key, call.decode.worker_id, call.decode.incarnation, facts, now)
        if entry.request_hash != facts.request_hash:
            stop = self._run(entry, mismatch(), now) if entry.call is None else []
            return [*out, *stop, refused(call.key, Refusal.BAD_TICKET, MISMATCH)]
        if not entry.session.live:
            over = Prefilled(key=call.key, outcome=entry.session.outcome)
            return [*out, AnswerPrefill(key=call.key, message=over)]
        if entry.call is None:
            self._attach(entry, call, now)
        deadline_at = min(now + call.deadline_s, facts.prefill_expires)
        return out + self._run(entry, table.PrefillHalf(deadline_at=deadline_at), now)

    def cancel(self, key: Key, now: float) -> tuple[Outcome, list[Effect]]:
        """The router cancels this key. The outcome says what is known to have happened."""
        recorded = self.stones.answer(key)
        if recorded is not None:
            return recorded, []
        entry = self._live.get(key.request_id)
        if entry is not None and entry.session.key > key:
            return Outcome.SUPERSEDED, []
        if entry is None or entry.session.key < key:
            self.stones.put(key, Outcome.NEVER_STARTED, now + LONGEST_TICKET_S)
        if entry is None:
            return Outcome.NEVER_STARTED, []
        if entry.session.outcome is Outcome.COMPLETE:
            return Outcome.COMPLETE, []
        stop = table.Stop(outcome=Outcome.STOPPED, detail="cancelled", tell_peer=False)
        return Outcome.STOPPING, self._run(entry, stop, now)

    def message(self, peer: str, incarnation: int, message: TransferMessage, now: float) -> list[Effect]:
        """A decode worker's message, already checked to be for this incarnation."""
        if isinstance(message, Renew):
            return self._on_renew(peer, incarnation, message, now)
        if isinstance(message, Grant):
            return self._on_grant(peer, incarnation, message, now)
        if not isinstance(message, Ack | Nack | Commit | Abort):
            return []
        entry = self._entries.get(message.key)
        if entry is None or not entry.is_peer(peer, incarnation):
            return []
        return self._run(entry, message, now)

    def seq_event(self, event: seq.SeqEvent, now: float) -> list[Effect]:
        """A scheduler event of a sequence that this role submitted."""
        entry = self._by_seq.get(event.seq_id)
        if entry is None:
            return []
        match event:
            case seq.Started():
                return self._on_started(entry, event, now)
            case seq.PageReady():
                entry.sealed(event, now)
                return self._run(entry, self._holds.sealed(entry, event), now)
            case seq.TokenSampled():
                entry.token = event
                return []
            case seq.SeqFinished():
                return self._on_finished(entry, event, now)
            case seq.Preempted():
                entry.num_preempted += 1
                return [Count(name="retractions"), *self._run(entry, table.PreemptedEvent(), now)]
            case seq.SeqFailed():
                failed = table.Stop(outcome=Outcome.STOPPED, detail=event.message)
                return self._run(entry, table.ComputeQuiet(), now) + self._run(entry, failed, now)
            case seq.SeqStopped():
                return self._run(entry, table.ComputeQuiet(), now)
            case _:
                return []

    def report(self, key: Key, now: float) -> Report | None:
        """What is known of a live key."""
        entry = self._entries.get(key)
        return None if entry is None else entry.report(self._ctx.worker_id, now)

    def stepped(self, step: seq.SeqStep, began: float, ended: float) -> None:
        """A chunk of a prompt was computed."""
        entry = self._by_seq.get(step.seq_id)
        if entry is not None:
            entry.compute.chunk(began, ended, len(step.token_ids))

    def digested(self, key: Key, index: int, page: PageName, digest: bytes, now: float) -> list[Effect]:
        """The answer to ComputeDigest."""
        entry = self._entries.get(key)
        if not self._holds.digested(index, page, digest) or entry is None:
            return []
        return self._run(entry, table.Digested(index=index, page=page, digest=digest), now)

    def computed(self, digests: Sequence[tuple[int, int, bytes]]) -> list[Effect]:
        """(page, its index, digest) of pages that the step now ending filled, before it is told of."""
        for page, index, digest in digests:
            self._holds.digested(index, self._pages.name(page), digest)
        return []

    def pool_shrunk(self, now: float) -> list[Effect]:
        """Pages went into quarantine: prompts that the pool can not hold any more are computed elsewhere."""
        stop = table.Stop(outcome=Outcome.NEVER_STARTED, detail="the prompt does not fit here any more")
        over = [e for e in self._entries.values() if e.num_pages(self._ctx) > self._pages.num_usable]
        return [effect for entry in over for effect in self._run(entry, stop, now)]

    def tick(self, now: float) -> list[Effect]:
        """Fires what is due. Call it only after the inbox is drained."""
        self.stones.expire(now)
        due = [e for e in self._entries.values() if e.session.next_timer() <= now]
        return [effect for entry in due for effect in self._run(entry, table.Tick(), now)]

    @property
    def put_off(self) -> bool:
        return self._holds.num_put_off > 0

    def rest(self) -> None:
        self._holds.rest()

    # -- inside -----------------------------------------------------------------------------------------

    def _no_room(self, call: PrefillRequest, half: Entry | None) -> AnswerPrefill | None:
        if self.draining and half is None:
            return refused(call.key, Refusal.DRAINING, "this worker takes no new requests")
        if self._ctx.num_pages(len(call.token_ids)) > self._pages.num_usable:
            return refused(call.key, Refusal.NEVER_FITS, "the prompt does not fit this worker's page pool")
        return None

    def _new(self, key: Key, peer: str, incarnation: int, facts: ticket.TicketFacts, now: float) -> Entry:
        lease_s = self._ctx.lease_s
        session = PrefillSession(
            key=key, lease_s=lease_s, lease_until=now + lease_s, deadline_at=facts.prefill_expires
        )
        entry = Entry(
            session=session, peer=peer, peer_incarnation=incarnation, ticket_until=facts.prefill_expires,
            request_hash=facts.request_hash,
        )  # fmt: skip
        self._live[key.request_id] = self._entries[key] = self._by_seq[seq_id_of(key)] = entry
        return entry

    def _attach(self, entry: Entry, call: PrefillRequest, now: float) -> None:
        entry.call = call
        entry.queued_at = now
        entry.keys = page_keys(
            call.token_ids, self._ctx.page_size, salt=cache_salt(call.tenant, call.cache_salt),
            model=self._ctx.model, numerics=self._ctx.numerics,
        )  # fmt: skip

    def _supersede(self, key: Key, now: float) -> list[Effect]:
        """Guard 3: a higher key ends the lower one first. That one is known until it is quiet."""
        entry = self._live.get(key.request_id)
        if entry is None or entry.session.key >= key:
            return []
        return self._run(entry, table.Stop(outcome=Outcome.SUPERSEDED, tell_peer=False), now)

    def _on_grant(self, peer: str, incarnation: int, grant: Grant, now: float) -> list[Effect]:
        facts = check_grant(self._ctx, peer, incarnation, grant, now)
        if facts is None:
            return [Count(name="refused_tickets")]
        recorded = self._recorded(grant.key)
        if recorded is not None:
            return [to_peer(peer, incarnation, Abort(key=grant.key, outcome=recorded))]
        out = self._supersede(grant.key, now)
        entry = self._entries.get(grant.key)
        if entry is None:
            if self.draining:
                abort = Abort(key=grant.key, outcome=Outcome.NEVER_STARTED, detail="draining")
                return [*out, to_peer(peer, incarnation, abort)]
            entry = self._new(grant.key, peer, incarnation, facts, now)
        if not entry.is_peer(peer, incarnation):
            return out
        if entry.request_hash != facts.request_hash:
            if entry.session.grant is not None:
                return out
            abort = Abort(key=grant.key, outcome=Outcome.NEVER_STARTED, detail=MISMATCH)
            return [*out, *self._run(entry, mismatch(), now), to_peer(peer, incarnation, abort)]
        return out + self._run(entry, grant, now)

    def _recorded(self, key: Key) -> Outcome | None:
        """Guard 2: what is to be said about a key that ended here, or that a higher one has replaced."""
        entry = self._live.get(key.request_id)
        if entry is not None and entry.session.key > key:
            return Outcome.SUPERSEDED
        if entry is not None and entry.session.key == key and not entry.session.live:
            return entry.session.outcome
        return self.stones.answer(key)

    def _on_renew(self, peer: str, incarnation: int, renew: Renew, now: float) -> list[Effect]:
        if renew.answer:
            return []  # a new stream's hello asks nothing; an empty answer would count every key missed
        known: list[Key] = []
        out: list[Effect] = []
        asked = frozenset(renew.keys)
        for key, entry in list(self._entries.items()):
            if not entry.is_peer(peer, incarnation):
                continue
            if key in asked:
                known.append(key)
                entry.missed = 0
                out += self._run(entry, table.Renewed(), now)
            elif entry.session.waits_for_renewal:
                entry.missed += 1
                out += self._run(entry, LOST, now) if entry.missed >= 2 else []
        return [*out, to_peer(peer, incarnation, Renew(keys=tuple(known), answer=True))]

    def _on_started(self, entry: Entry, event: seq.Started, now: float) -> list[Effect]:
        hits: list[Effect] = []
        if not entry.started_at:
            entry.started_at = now
            entry.hit_tokens = event.hit_tokens
            hits = measures.prompt_tokens("prefix_hit", event.hit_tokens)
        return hits + self._run(entry, table.Scheduled(), now)

    def _on_finished(self, entry: Entry, event: seq.SeqFinished, now: float) -> list[Effect]:
        assert entry.token is not None
        entry.done_at = now
        made = entry.token
        first = table.FirstToken(
            index=made.index, token_id=made.token_id, finish=event.reason, logprob=made.logprob
        )
        return measures.prompt_computed(entry.compute) + self._run(entry, first, now)

    def _run(self, entry: Entry, event: table.PEvent, now: float) -> list[Effect]:
        """Steps a session and carries its effects out, with the events these make in turn."""
        out: list[Effect] = []
        entry.todo.append(event)
        while entry.todo:
            for effect in entry.session.step(entry.todo.pop(0), now):
                out += self._do(entry, effect, now)
        return out

    def _do(self, entry: Entry, effect: table.PEffect, now: float) -> list[Effect]:
        key = entry.session.key
        match effect:
            case table.PSend():
                message = entry.stamped(effect.message, self._ctx.worker_id, now)
                return [to_peer(entry.peer, entry.peer_incarnation, message)]
            case table.PQueue():
                entry.compute.ready(now)
                return self._submit(entry)
            case table.PHold():
                return self._holds.take(entry, effect)
            case table.PRehash():
                return [compute(key, effect)]
            case table.PDrop():
                self._holds.drop(key, effect.page)
            case table.PDropRequest():
                self._holds.put_off(seq_id_of(key))
            case table.PStopCompute():
                if not self._scheduler.has(seq_id_of(key)) or self._scheduler.cancel(seq_id_of(key)):
                    entry.todo.append(table.ComputeQuiet())
            case table.PUnpublish():
                return self._unpublish(effect.page, now)
            case table.PReport():
                return self._report(entry, effect, now)
            case table.PDone():
                self._forget(entry, effect.outcome)
        return []

    def _submit(self, entry: Entry) -> list[Effect]:
        call = entry.call
        assert call is not None
        self._scheduler.submit(sequence(call, seq_id_of(call.key), entry.queued_at))
        return []

    def _unpublish(self, page: PageName, now: float) -> list[Effect]:
        """A page's bytes changed here: it and what is chained after it leave the cache, and every request
        that computes from it ends, to be computed elsewhere."""
        self._pages.unpublish_chain(page.page)
        out: list[Effect] = [Count(name="source_corrupt")]
        stop = table.Stop(outcome=Outcome.SOURCE_CORRUPT, detail="page bytes changed at the source")
        for entry in [e for e in self._entries.values() if e.session.uses(page)]:
            out += self._run(entry, stop, now)
        return out

    def _report(self, entry: Entry, effect: table.PReport, now: float) -> list[Effect]:
        if entry.call is None:
            return []
        key = entry.session.key
        done = Prefilled(
            key=key, outcome=effect.outcome, detail=effect.detail,
            ledger=entry.ledger(self._ctx.worker_id, now),
        )  # fmt: skip
        return [AnswerPrefill(key=key, message=done)]

    def _forget(self, entry: Entry, outcome: Outcome) -> None:
        key = entry.session.key
        self.stones.put(key, outcome, entry.ticket_until)
        self._entries.pop(key, None)
        self._by_seq.pop(seq_id_of(key), None)
        if self._live.get(key.request_id) is entry:
            del self._live[key.request_id]
