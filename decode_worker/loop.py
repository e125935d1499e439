"""The decode role of a worker, as pure code: carries out the effects of its sessions on pages and scheduler.

What lives here: taking requests (reservation, prefix hits, local or not), which session an event belongs
to, target pages and their I/O pins, renewals. What does not: the state table (`kvtransfer.session.decode`),
sockets, tensors and threads.
"""

from __future__ import annotations

from dataclasses import replace

from decode_worker import measures
from decode_worker.entry import Entry, PromptWork
from decode_worker.pace import pace_s
from decode_worker.pulls import Pulls
from decode_worker.replies import refused, repeated, superseded, unknown
from decode_worker.reserve import Reservation, longest_pages, reserve
from decode_worker.sequences import PREFIX, Sequences, holder_of, seq_id_of
from kvtransfer import ticket
from kvtransfer.effects import AnswerDecode, Count, Dial, Effect, ToPrefiller
from kvtransfer.session import decode_events as table
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.guard import LONGEST_TICKET_S, RoleContext, Tombstones, check_call
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.manager import PageManager
from pdserve.messages import (
    Abort,
    Announce,
    Finish,
    Outcome,
    Refusal,
    Refused,
    Renew,
    Report,
    Reserve,
    Reserved,
    Token,
    TransferMessage,
)
from pdserve.sched import plan as seq
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import HandoverMode, Key


class DecodeRole:
    """All live decode sessions of one worker. Called by the control thread only."""

    def __init__(
        self,
        ctx: RoleContext,
        pages: PageManager,
        scheduler: StepScheduler,
        *,
        page_bytes: int,
    ) -> None:
        self._ctx = ctx
        self._pages = pages
        self._scheduler = scheduler
        self._page_bytes = page_bytes
        self._live: dict[str, Entry] = {}  # newest key of each request
        self._entries: dict[Key, Entry] = {}  # those and superseded ones that are not quiet yet
        self._by_seq: dict[str, Entry] = {}
        self._pulls = Pulls(ctx, pages)
        self._sequences = Sequences(ctx, pages, scheduler)
        self._renew_at = float("inf")
        self.stones = Tombstones()
        self.draining = False

    # -- questions --------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._entries)

    @property
    def num_active(self) -> int:
        """Keys that can still make progress."""
        return sum(entry.session.live for entry in self._entries.values())

    @property
    def leases(self) -> tuple[int, int]:
        """Keys that prefill must be heard of within a lease, and pages that it may still announce."""
        pulling = [entry.session for entry in self._entries.values() if entry.session.pulling]
        return len(pulling), sum(max(0, one.granted - len(one.pages)) for one in pulling)

    @property
    def pace_s(self) -> float:
        """Least time from one decode step to the next: while a prefill worker of this very machine computes
        prompts for us, each small step would take more from it than it gives (0: as fast as can be)."""
        here = self._ctx.host_id
        num_prompts = sum(
            e.session.pulling and e.call.prefill is not None and e.call.prefill.host_id == here
            for e in self._entries.values()
        )
        return pace_s(self._ctx.decode_pace_s, num_prompts)

    def owns(self, seq_id: str) -> bool:
        """Whether a scheduler event is this role's."""
        return seq_id.startswith(PREFIX)

    def next_timer(self) -> float:
        """When tick is due next; infinity if never."""
        timers = [e.session.next_timer() for e in self._entries.values()]
        return min([*timers, self._pulls.next_timer(), self._renew_at])

    # -- inputs -----------------------------------------------------------------------------------------

    def reserve(self, call: Reserve, now: float) -> list[Effect]:
        """The router's Reserve. Answered at once by Reserved or Refused."""
        facts = check_call(self._ctx, call, now)
        if not isinstance(facts, ticket.TicketFacts):
            return [refused(call.key, *facts)]
        recorded = self.stones.answer(call.key)
        if recorded is not None:
            return [refused(call.key, Refusal.OUTDATED_KEY, f"this try is over: {recorded}")]
        entry = self._live.get(call.key.request_id)
        if entry is not None and entry.session.key > call.key:
            return [refused(call.key, Refusal.OUTDATED_KEY, "a newer try is running")]
        if entry is not None and entry.session.key == call.key:
            return repeated(entry, self._ctx.page_size)
        return self._take(call, entry, facts, now)

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
        if not entry.session.live and entry.session.outcome is Outcome.COMPLETE:
            return Outcome.COMPLETE, []
        stop = table.Stop(label="cancelled", message="the request was cancelled", retryable=False)
        return Outcome.STOPPING, self._run(entry, stop, now)

    def switch_local(self, key: Key, now: float) -> tuple[Outcome, list[Effect]]:
        """The router says that the prefill side is gone: go on alone with what is verified."""
        entry = self._entries.get(key)
        if entry is None:
            return self.stones.answer(key) or Outcome.UNKNOWN, []
        if not entry.session.live:
            return entry.session.outcome, []
        if not entry.session.pulling:
            return Outcome.COMPLETE, []
        return Outcome.STOPPING, self._run(entry, table.Switch(detail="prefill worker is gone"), now)

    def message(self, peer: str, incarnation: int, message: TransferMessage, now: float) -> list[Effect]:
        """A prefill worker's message, already checked to be for this incarnation."""
        if isinstance(message, Renew):
            return self._on_renewed(peer, incarnation, message, now) if message.answer else []
        if not isinstance(message, Announce | Finish | Abort):
            return []
        entry = self._entries.get(message.key)
        if entry is None:
            return unknown(peer, incarnation, message, self.stones.answer(message.key))
        if not entry.is_peer(peer, incarnation):
            return []
        if isinstance(message, Finish):
            entry.finished(message, now)
        return self._run(entry, message, now)

    def read_done(
        self, read_id: int, status: ReadStatus, digest: bytes, path: str, now: float,
        stamps: tuple[float, float] | None = None,
    ) -> list[Effect]:  # fmt: skip
        """The transport `path` reports the end of a read: nothing touches the page any more.

        stamps: when the bytes were in place and when they were verified, if the transport knows; else now.
        """
        entry, event = self._pulls.done(read_id, status, digest, path, stamps or (now, now))
        return [Count(name=f"reads_{status}"), *self._run(entry, event, now)]

    def seq_event(self, event: seq.SeqEvent, now: float) -> list[Effect]:
        """A scheduler event of a sequence that this role submitted."""
        entry = self._by_seq.get(event.seq_id)
        if entry is None:
            return []
        match event:
            case seq.Started():
                hits = measures.started(entry, event.hit_tokens)
                entry.computing.started(event.hit_tokens)
                return hits
            case seq.PageReady():
                entry.computing.sealed(event)
                return []
            case seq.PromptDone():
                entry.computing.done()
                return measures.computed(entry)
            case seq.TokenSampled():
                made = table.Sampled(index=event.index, token_id=event.token_id, logprob=event.logprob)
                return measures.sampled(entry) + self._run(entry, made, now)
            case seq.SeqFinished():
                assert event.reason is not None
                return self._run(entry, table.Finished(reason=event.reason), now)
            case seq.Preempted():
                entry.num_retractions += 1
                entry.computing.retracted()
                return [Count(name="retractions")]
            case seq.SeqFailed():
                stop = table.Stop(label=event.label, message=event.message, retryable=False)
                return self._run(entry, table.ComputeQuiet(), now) + self._run(entry, stop, now)
            case seq.SeqStopped():
                return self._run(entry, table.ComputeQuiet(), now)
            case _:
                return []

    def report(self, key: Key, now: float) -> Report | None:
        """What is known of a live key."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return Report(doing=entry.doing(), ledger=entry.ledger(self._ctx, self._page_bytes, now))

    def stepped(self, step: seq.SeqStep, began: float, ended: float) -> None:
        """A step computed for one of our sequences."""
        entry = self._by_seq.get(step.seq_id)
        if entry is not None:
            entry.stepped(step, began, ended)

    def emitted(self, token: Token, now: float) -> Token:
        """The driver sends the first token of a try now: the same token with the ledger up to here."""
        entry = self._entries.get(token.key)
        if entry is None:
            return token
        entry.emitted_at = now
        return replace(token, ledger=entry.ledger(self._ctx, self._page_bytes, now))

    def pool_shrunk(self, now: float) -> list[Effect]:
        """Pages went into quarantine: requests that the pool can not hold any more go elsewhere."""
        message = "the request does not fit this worker any more"
        stop = table.Stop(label="unavailable", message=message, retryable=True)
        over = [
            e for e in self._entries.values()
            if e.session.live and longest_pages(self._ctx, e.call) > self._pages.num_usable
        ]  # fmt: skip
        return [effect for entry in over for effect in self._run(entry, stop, now)]

    def tick(self, now: float) -> list[Effect]:
        """Fires what is due. Call it only after the inbox is drained."""
        self.stones.expire(now)
        due = [e for e in self._entries.values() if e.session.next_timer() <= now]
        out = [effect for entry in due for effect in self._run(entry, table.Tick(), now)]
        if now >= self._renew_at:
            out += self._renew(now)
        return out + self._pulls.tick(now)

    @property
    def put_off(self) -> bool:
        """See Role."""
        return self._sequences.put_off

    def rest(self) -> None:
        """Offers pages of requests that began to run to the prefix cache."""
        self._sequences.rest()

    # -- inside -----------------------------------------------------------------------------------------

    def _take(self, call: Reserve, old: Entry | None, facts: ticket.TicketFacts, now: float) -> list[Effect]:
        """Takes a new key, or says why not. Guard 3: what it needs is held before the lower key is ended, and
        that one's pages pass to it; so a try that does not fit costs the one that runs nothing."""
        going_on = old is not None and old.session.live
        if self.draining and not going_on:
            return [refused(call.key, Refusal.DRAINING, "this worker takes no new requests")]
        if call.mode is HandoverMode.LOCAL and self._scheduler.num_waiting >= self._ctx.max_num_seqs:
            return [refused(call.key, Refusal.FULL, "too many requests wait here", retry_after_s=0.2)]
        if call.mode is HandoverMode.LOCAL:
            self._sequences.rest()  # the prompt may be one that has just come by wire: another choice of it
        kept = old.kept(holder_of(old.session.key)) if old is not None else None
        held = reserve(self._ctx, self._pages, call, seq_id_of(call.key), kept)
        if isinstance(held, Refused):
            return [AnswerDecode(key=call.key, message=held)]
        out = self._run(old, superseded(), now) if old is not None else []
        return out + self._accept(call, held, facts, arrival=old.arrival if old is not None else now, now=now)

    def _accept(
        self, call: Reserve, held: Reservation, facts: ticket.TicketFacts, *, arrival: float, now: float
    ) -> list[Effect]:
        ctx = self._ctx
        session = DecodeSession(
            key=call.key, lease_s=ctx.lease_s, credit_pages=ctx.credit_pages,
            num_ranks=len(held.origin.parts),
        )  # fmt: skip
        entry = Entry(
            session=session,
            call=call,
            held=held,
            ticket_until=facts.decode_expires,
            accepted_at=now,
            arrival=arrival,
            computing=PromptWork(num_tokens=held.rows, page_size=held.page_size),
        )
        self._live[call.key.request_id] = self._entries[call.key] = entry
        self._by_seq[seq_id_of(call.key)] = entry
        answer = Reserved(key=call.key, mode=held.mode, hit_tokens=held.hit_pages * ctx.page_size)
        out: list[Effect] = [AnswerDecode(key=call.key, message=answer)]
        if held.mode is HandoverMode.DISAGGREGATED:
            assert call.prefill is not None
            out.append(Dial(peer=call.prefill))
            self._renew_at = min(self._renew_at, now + self._ctx.lease_s / 3)
        spread = entry.spread
        accepted = table.Accepted(
            mode=held.mode, num_pages=spread.num_source_pages, hit_pages=spread.source_hits,
            ticket=call.ticket, deadline_at=min(now + call.deadline_s, facts.decode_expires),
            num_forced=call.num_forced, max_tokens=call.sampling.max_tokens, verified=spread.source_verified,
        )  # fmt: skip
        return out + measures.accepted(entry) + self._run(entry, accepted, now)

    def _renew(self, now: float) -> list[Effect]:
        """One Renew per prefill worker with the keys that are still pulled from it."""
        by_peer: dict[tuple[str, int], list[Key]] = {}
        for key, entry in self._entries.items():
            if entry.session.pulling and entry.call.prefill is not None:
                ref = entry.call.prefill
                by_peer.setdefault((ref.worker_id, ref.incarnation), []).append(key)
        self._renew_at = now + self._ctx.lease_s / 3 if by_peer else float("inf")
        return [
            ToPrefiller(peer=p, incarnation=i, message=Renew(keys=tuple(k))) for (p, i), k in by_peer.items()
        ]

    def _on_renewed(self, peer: str, incarnation: int, renew: Renew, now: float) -> list[Effect]:
        out: list[Effect] = []
        for key, entry in list(self._entries.items()):
            if not entry.session.pulling or not entry.is_peer(peer, incarnation):
                continue
            entry.missed = 0 if key in renew.keys else entry.missed + 1
            if not entry.missed:
                out += self._run(entry, table.PeerSeen(), now)
            elif entry.missed >= 2:
                out += self._run(entry, table.Switch(detail="prefill lost this key"), now)
        return out

    def _run(self, entry: Entry, event: table.DEvent, now: float) -> list[Effect]:
        """Steps a session and carries its effects out, with the events these make in turn."""
        out: list[Effect] = []
        entry.todo.append(event)
        while entry.todo:
            for effect in entry.session.step(entry.todo.pop(0), now):
                out += self._do(entry, effect, now)
        return out

    def _do(self, entry: Entry, effect: table.DEffect, now: float) -> list[Effect]:
        key = entry.session.key
        match effect:
            case table.DSend():
                return self._send(entry, effect.message)
            case table.DRead():
                return self._pulls.start(entry, effect.announce, now)
            case table.DCancelReads():
                return self._pulls.cancel(entry)
            case table.DRun():
                entry.running_at = now
                self._sequences.go_on(entry, effect.finish)
                return measures.transferred(entry, "complete")
            case table.DRunLocal():
                entry.running_at = now
                entry.compute.ready(now)
                self._sequences.prefill(entry, effect.verified_pages)
                return measures.transferred(entry, "failed")
            case table.DEmit():
                token = Token(key=key, index=effect.index, token_id=effect.token_id, logprob=effect.logprob)
                if not entry.tokens:
                    token = self.emitted(token, now)
                entry.tokens.append(token)
                return [AnswerDecode(key=key, message=token)]
            case table.DEnd():
                end = entry.ended(effect, self._ctx, self._page_bytes, now)
                return [*measures.transferred(entry, "cancelled"), AnswerDecode(key=key, message=end)]
            case table.DStopCompute():
                if self._sequences.stop(key):
                    entry.todo.append(table.ComputeQuiet())
            case table.DDropPages():
                self._drop_pages(key)
            case table.DRelease():
                self._release(entry, effect.outcome)
            case table.DCount():
                return [Count(name=effect.name)]
        return []

    def _send(self, entry: Entry, message: TransferMessage) -> list[Effect]:
        peer = entry.call.prefill
        if peer is None:
            return []
        return [ToPrefiller(peer=peer.worker_id, incarnation=peer.incarnation, message=message)]

    def _drop_pages(self, key: Key) -> None:
        self._sequences.leave(key)
        self._pages.drop_all(holder_of(key))

    def _release(self, entry: Entry, outcome: Outcome) -> None:
        key = entry.session.key
        self._drop_pages(key)
        self.stones.put(key, outcome, entry.ticket_until)
        self._entries.pop(key, None)
        self._by_seq.pop(seq_id_of(key), None)
        if self._live.get(key.request_id) is entry:
            del self._live[key.request_id]
