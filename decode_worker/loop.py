"""The decode role of a worker, as pure code: carries out the effects of its sessions on pages and scheduler.

What lives here: taking requests (reservation, prefix hits, local or not), which session an event belongs
to, target pages and their I/O pins, renewals. What does not: the state table (`kvtransfer.session.decode`),
sockets, tensors and threads.
"""

from __future__ import annotations

from dataclasses import replace

from decode_worker.entry import Entry
from decode_worker.pulls import Pulls
from decode_worker.reserve import Reservation, reserve
from kvtransfer import ticket
from kvtransfer.effects import AnswerDecode, Count, Dial, Effect, ToPrefiller
from kvtransfer.session import decode_events as table
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.guard import LONGEST_TICKET_S, RoleContext, Tombstones, check_call
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.messages import (
    Abort,
    Announce,
    Commit,
    Finish,
    Outcome,
    Refusal,
    Refused,
    Renew,
    Reserve,
    Reserved,
    Token,
    TransferMessage,
)
from pdserve.sched.plan import (
    Preempted,
    SeqEvent,
    SeqFailed,
    SeqFinished,
    SeqKind,
    SeqSpec,
    SeqStep,
    SeqStopped,
    Started,
    TokenSampled,
)
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import HandoverMode, Key

PREFIX = "D:"


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
        self._renew_at = float("inf")
        self._stones = Tombstones()
        self.draining = False

    # -- questions --------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._entries)

    @property
    def pace_s(self) -> float:
        """Least time from one decode step to the next: while a prefill worker of this very machine computes
        prompts for us, each small step would take more from it than it gives (0: as fast as can be)."""
        here = self._ctx.host_id
        shared = any(
            e.session.pulling and e.call.prefill is not None and e.call.prefill.host_id == here
            for e in self._entries.values()
        )
        return self._ctx.decode_pace_s if shared else 0.0

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
            return [_refused(call.key, *facts)]
        recorded = self._stones.answer(call.key)
        if recorded is not None:
            return [_refused(call.key, Refusal.OUTDATED_KEY, f"this try is over: {recorded}")]
        live = self._live.get(call.key.request_id)
        if live is not None and live.session.key >= call.key:
            return [_refused(call.key, Refusal.OUTDATED_KEY, "this try or a newer one is running")]
        out: list[Effect] = []
        if live is not None:
            out += self._run(live, _superseded(), now)
            self._live.pop(call.key.request_id, None)
        if self.draining:
            return [*out, _refused(call.key, Refusal.DRAINING, "this worker takes no new requests")]
        if call.mode is HandoverMode.LOCAL and self._scheduler.num_waiting >= self._ctx.max_num_seqs:
            return [*out, _refused(call.key, Refusal.FULL, "too many requests wait here", retry_after_s=0.2)]
        held = reserve(self._ctx, self._pages, call, _seq_id(call.key))
        if isinstance(held, Refused):
            return [*out, AnswerDecode(key=call.key, message=held)]
        return out + self._accept(call, held, facts, now)

    def cancel(self, key: Key, now: float) -> tuple[Outcome, list[Effect]]:
        """The router cancels this key. The outcome says what is known to have happened."""
        recorded = self._stones.answer(key)
        if recorded is not None:
            return recorded, []
        entry = self._live.get(key.request_id)
        if entry is not None and entry.session.key > key:
            return Outcome.SUPERSEDED, []
        if entry is None or entry.session.key < key:
            self._stones.put(key, Outcome.NEVER_STARTED, now + LONGEST_TICKET_S)
        if entry is None:
            return Outcome.NEVER_STARTED, []
        stop = table.Stop(label="cancelled", message="the request was cancelled", retryable=False)
        return Outcome.STOPPING, self._run(entry, stop, now)

    def switch_local(self, key: Key, now: float) -> tuple[Outcome, list[Effect]]:
        """The router says that the prefill side is gone: go on alone with what is verified."""
        entry = self._entries.get(key)
        if entry is None:
            return self._stones.answer(key) or Outcome.UNKNOWN, []
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
            return self._unknown(peer, incarnation, message)
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

    def seq_event(self, event: SeqEvent, now: float) -> list[Effect]:
        """A scheduler event of a sequence that this role submitted."""
        entry = self._by_seq.get(event.seq_id)
        if entry is None:
            return []
        match event:
            case Started():
                if entry.local_start is not None and not entry.num_retractions:
                    entry.local_hits = event.hit_tokens
                return []
            case TokenSampled():
                return self._run(entry, table.Sampled(index=event.index, token_id=event.token_id), now)
            case SeqFinished():
                assert event.reason is not None
                return self._run(entry, table.Finished(reason=event.reason), now)
            case Preempted():
                entry.num_retractions += 1
                return [Count(name="retractions")]
            case SeqFailed():
                stop = table.Stop(label="internal", message=event.message, retryable=False)
                return self._run(entry, table.ComputeQuiet(), now) + self._run(entry, stop, now)
            case SeqStopped():
                return self._run(entry, table.ComputeQuiet(), now)
            case _:
                return []

    def stepped(self, step: SeqStep, began: float, ended: float) -> None:
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

    def tick(self, now: float) -> list[Effect]:
        """Fires what is due. Call it only after the inbox is drained."""
        self._stones.expire(now)
        due = [e for e in self._entries.values() if e.session.next_timer() <= now]
        out = [effect for entry in due for effect in self._run(entry, table.Tick(), now)]
        if now >= self._renew_at:
            out += self._renew(now)
        return out + self._pulls.tick(now)

    # -- inside -----------------------------------------------------------------------------------------

    def _accept(
        self, call: Reserve, held: Reservation, facts: ticket.TicketFacts, now: float
    ) -> list[Effect]:
        session = DecodeSession(key=call.key, lease_s=self._ctx.lease_s)
        entry = Entry(
            session=session, call=call, held=held, ticket_until=facts.decode_expires, accepted_at=now
        )
        self._live[call.key.request_id] = self._entries[call.key] = entry
        self._by_seq[_seq_id(call.key)] = entry
        hit_tokens = held.hit_pages * self._ctx.page_size
        answer = Reserved(key=call.key, mode=held.mode, hit_tokens=hit_tokens)
        out: list[Effect] = [AnswerDecode(key=call.key, message=answer)]
        if held.mode is HandoverMode.DISAGGREGATED:
            assert call.prefill is not None
            out.append(Dial(peer=call.prefill))
            self._renew_at = min(self._renew_at, now + self._ctx.lease_s / 3)
        accepted = table.Accepted(
            mode=held.mode, num_pages=held.num_pages, hit_pages=held.hit_pages, ticket=call.ticket,
            deadline_at=now + call.deadline_s, num_forced=call.num_forced,
            max_tokens=call.sampling.max_tokens,
        )  # fmt: skip
        return out + self._run(entry, accepted, now)

    def _unknown(self, peer: str, incarnation: int, message: Announce | Finish | Abort) -> list[Effect]:
        """P talks about a key that is not live here: definitive, as P announces only after Grant."""
        if isinstance(message, Abort):
            return []
        recorded = self._stones.answer(message.key)
        reply: TransferMessage = Abort(key=message.key, outcome=recorded or Outcome.UNKNOWN)
        if recorded is Outcome.COMPLETE:
            reply = Commit(key=message.key)
        return [ToPrefiller(peer=peer, incarnation=incarnation, message=reply)]

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
                self._publish(entry)
                entry.running_at = now
                if effect.finish.finish is None:
                    self._submit(entry, first=effect.finish.token_id)
            case table.DRunLocal():
                entry.running_at = now
                entry.compute.ready(now)
                self._submit_local(entry, effect.verified_pages)
            case table.DEmit():
                token = Token(key=key, index=effect.index, token_id=effect.token_id)
                entry.num_tokens += 1
                if entry.num_tokens == 1:
                    token = self.emitted(token, now)
                return [AnswerDecode(key=key, message=token)]
            case table.DEnd():
                return [AnswerDecode(key=key, message=entry.ended(effect, self._ctx, self._page_bytes, now))]
            case table.DStopCompute():
                if not self._scheduler.has(_seq_id(key)) or self._scheduler.cancel(_seq_id(key)):
                    entry.todo.append(table.ComputeQuiet())
            case table.DRelease():
                self._release(entry, effect.outcome)
        return []

    def _send(self, entry: Entry, message: TransferMessage) -> list[Effect]:
        peer = entry.call.prefill
        if peer is None:
            return []
        return [ToPrefiller(peer=peer.worker_id, incarnation=peer.incarnation, message=message)]

    def _publish(self, entry: Entry) -> None:
        """Seals the full prompt pages that came by wire and offers them to the prefix cache."""
        held = entry.held
        for index in range(held.hit_pages, len(held.full_keys)):
            self._pages.seal(held.pages[index], self._ctx.page_size)
            if entry.call.use_prefix_cache:
                parent = held.full_keys[index - 1] if index else None
                self._pages.publish(held.pages[index], held.full_keys[index], parent)

    def _submit(self, entry: Entry, *, first: int) -> None:
        num_tokens = len(entry.call.token_ids)
        tokens = (*entry.call.token_ids, first)
        self._scheduler.submit(
            self._spec(entry, tokens, num_computed=num_tokens, num_shared=len(entry.held.full_keys))
        )

    def _submit_local(self, entry: Entry, verified_pages: int) -> None:
        tokens = entry.call.token_ids
        done = min(verified_pages * self._ctx.page_size, len(tokens) - 1)
        entry.local_start = done
        self._scheduler.submit(self._spec(entry, tokens, num_computed=done, num_shared=entry.held.hit_pages))

    def _spec(self, entry: Entry, tokens: tuple[int, ...], *, num_computed: int, num_shared: int) -> SeqSpec:
        call = entry.call
        return SeqSpec(
            seq_id=_seq_id(call.key), kind=SeqKind.FULL, token_ids=tokens,
            num_prompt=len(call.token_ids) - call.num_forced, sampling=call.sampling,
            arrival=entry.accepted_at, num_computed=num_computed, pages=entry.held.pages,
            num_shared=num_shared, use_prefix_cache=call.use_prefix_cache, cache_salt=entry.held.salt,
            priority=call.priority,
        )  # fmt: skip

    def _release(self, entry: Entry, outcome: Outcome) -> None:
        key = entry.session.key
        self._pages.drop_all(Holder(HolderKind.REQUEST, _seq_id(key)))
        self._stones.put(key, outcome, entry.ticket_until)
        self._entries.pop(key, None)
        self._by_seq.pop(_seq_id(key), None)
        if self._live.get(key.request_id) is entry:
            del self._live[key.request_id]


def _superseded() -> table.Stop:
    message = "a newer try of this request took over"
    return table.Stop(label="cancelled", message=message, retryable=False, outcome=Outcome.SUPERSEDED)


def _seq_id(key: Key) -> str:
    return f"{PREFIX}{key}"


def _refused(key: Key, reason: Refusal, detail: str, *, retry_after_s: float = 0.0) -> AnswerDecode:
    refused = Refused(key=key, reason=reason, detail=detail, retry_after_s=retry_after_s)
    return AnswerDecode(key=key, message=refused)
