"""The simulated router: the production lifecycle, policy, admission queue, membership, accounting and
tickets, with what `router.request`, `router.dispatch` and `router.roster` do around them in asyncio done
in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdserve.errors import Overloaded
from pdserve.messages import PrefillRequest, Reserve
from pdserve.types import PeerRef, Role, SamplingParams, WorkerLoad, WorkerRecord
from router import events as ev
from router import lifecycle
from router.admission import AdmissionQueue, QueueLimits, Waiting
from router.inflight import InFlight
from router.membership import Membership, MembershipConfig
from router.policy import Ask, Candidate, Choice, PolicyConfig, choose, choose_prefill
from router.request_state import Phase, RequestState
from router.tickets import TicketMint
from tests.simulation.bias import LEASE_S, LOST_S, SUSPECT_S
from tests.simulation.model import END_TOKEN
from tests.simulation.process import SECRET
from tests.simulation.router_calls import LOST_MESSAGE, ROUTER, RouterCalls

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet

TICK_S = 0.25
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a client asks for. stop_after: the stream's stop text matches at this token; 0: never."""

    name: str
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampled: bool
    deadline_s: float
    stop_after: int = 0
    priority: int = 0
    probe: bool = False


@dataclass(slots=True, kw_only=True)
class Request:
    """One client request and what came back. row: of the prompt and what was delivered."""

    wish: Wish
    state: RequestState
    sampling: SamplingParams
    arrival: int
    started_at: float
    row: int
    got: list[int] = field(default_factory=list)
    end: ev.EndStream | None = None
    ended_at: float = float("inf")
    gone: bool = False
    queued_at: float = 0.0

    @property
    def deadline_at(self) -> float:
        return self.started_at + self.wish.deadline_s


class SimRouter:
    """One router. Its clock is its own too."""

    def __init__(self, fleet: Fleet, offset: float) -> None:
        self._fleet, self._world, self._offset = fleet, fleet.world, offset
        self.membership = Membership(MembershipConfig(suspect_after_s=SUSPECT_S, lost_after_s=LOST_S))
        self.queue = AdmissionQueue(QueueLimits(max_requests=64, max_wait_s=60.0))
        self.inflight = InFlight()
        self.calls = RouterCalls(fleet, self)
        self.requests: dict[str, Request] = {}
        self.policy = PolicyConfig(
            local_prefill_threshold=self._world.rng.choice((0, 0, 4)),
            prefill_backlog_tokens=self._world.rng.choice((0, 40, 80)),
        )
        self._tickets = TicketMint(secret=SECRET, lease_s=LEASE_S)
        self._ticket: dict[str, bytes | None] = {}
        self._blocked: dict[int, float] = {}
        self._pump_due = False
        self._busy: set[str] = set()
        self._todo: dict[str, list[Any]] = {}
        self._world.after(TICK_S, self._tick)

    def now(self) -> float:
        return self._world.now + self._offset

    @property
    def done(self) -> bool:
        return all(r.end is not None for r in self.requests.values())

    # -- workers --------------------------------------------------------------------------------------------

    def register(self, record: WorkerRecord, monotonic_s: float) -> None:
        joined = self.membership.register(record, monotonic_s, self.now())
        if joined.replaced is not None:
            self._lost(joined.replaced)
        self.poke()

    def heartbeat(self, record: WorkerRecord, load: WorkerLoad, monotonic_s: float) -> None:
        peer = record.peer
        if not self.membership.heartbeat(peer.worker_id, peer.incarnation, load, monotonic_s, self.now()):
            self.register(record, monotonic_s)
        self.poke()

    def suspect(self, peer: PeerRef) -> None:
        self.membership.broken(peer.worker_id, peer.incarnation)

    def _lost(self, record: WorkerRecord) -> None:
        incarnation = record.peer.incarnation
        self._world.note(ROUTER, f"gives {record.peer.worker_id} up")
        self.inflight.forget(incarnation)
        self._blocked.pop(incarnation, None)
        for name in tuple(self.requests):
            self.step(name, ev.WorkerGone(incarnation=incarnation))

    def _tick(self) -> None:
        for record in self.membership.tick(self.now()):
            self._lost(record)
        for entry in self.queue.expired(self.now()):
            self._shed(entry)
        self.poke()
        self._world.after(TICK_S, self._tick)

    # -- requests -------------------------------------------------------------------------------------------

    def submit(self, wish: Wish) -> Request | None:
        """A client's request arrives. None: shed at once."""
        texts = self._world.texts
        state = RequestState(
            request_id=wish.name,
            prompt=wish.prompt,
            max_tokens=wish.max_tokens,
            stop_ids=frozenset({END_TOKEN}),
        )
        sampling = SamplingParams(
            max_tokens=wish.max_tokens, temperature=1.0 if wish.sampled else 0.0, seed=len(self.requests)
        )
        request = Request(
            wish=wish, state=state, sampling=sampling, arrival=len(self.requests), started_at=self._world.now,
            row=texts.chain(wish.tenant, wish.prompt)[-1], queued_at=self.now(),
        )  # fmt: skip
        self._world.note(
            "client", f"asks {wish.name} tenant {wish.tenant} {len(wish.prompt)}+{wish.max_tokens}"
        )
        try:
            shed = self.queue.offer(self._waiting(request), self.now())
        except Overloaded:
            self._world.counters["overloaded"] += 1
            return None
        self.requests[wish.name] = request
        for entry in shed:
            self._shed(entry)
        self._world.after(wish.deadline_s, lambda: self.step(wish.name, ev.DeadlineHit()))
        self.poke()
        return request

    def client_leaves(self, name: str) -> None:
        """The client cancels: goes away, or aborts."""
        request = self.requests.get(name)
        if request is None or request.end is not None:
            return
        request.gone = True
        self._world.fault("cancel", "client", name)
        event = ev.ClientGone() if self._world.rng.random() < 0.5 else ev.AbortAsked()
        self.step(name, event)

    def _waiting(self, request: Request) -> Waiting:
        offset = self._offset
        return Waiting(
            request_id=request.wish.name, priority=request.wish.priority, arrival=request.arrival,
            tokens=len(request.wish.prompt) + len(request.got), queued_at=request.queued_at,
            deadline_at=request.deadline_at + offset, tried=request.state.num_tries > 0,
        )  # fmt: skip

    def _shed(self, entry: Waiting) -> None:
        self.step(entry.request_id, ev.Shed(message="The request waited too long.", retry_after_s=1.0))

    def step(self, name: str, event: Any) -> None:
        """Feeds the lifecycle, and what its effects bring about at once."""
        todo = self._todo.setdefault(name, [])
        todo.append(event)
        if name in self._busy:
            return
        self._busy.add(name)
        request = self.requests[name]
        if request.end is None:
            self._world.num_events += 1
        with self._fleet.judge.engine(None):
            while todo:
                for effect in lifecycle.step(request.state, todo.pop(0)):
                    self._do(request, effect)
        self._busy.discard(name)

    def _do(self, request: Request, effect: ev.Effect) -> None:
        match effect:
            case ev.SendReserve():
                self._send_reserve(request, effect)
            case ev.SendPrefill():
                self._send_prefill(request, effect)
            case ev.CancelDecode(key=key, decode=peer):
                self._world.note(ROUTER, f"→ {peer.worker_id}: cancel", key)
                self.calls.cancel("decode", peer, key)
                if effect.keep_stream:
                    self._world.after(SETTLE_S, lambda: self.step(key.request_id, ev.StopSettled()))
                else:
                    self.calls.drop_stream(key)
            case ev.CancelPrefill(key=key, prefill=peer):
                self._world.note(ROUTER, f"→ {peer.worker_id}: cancel prefill", key)
                self.calls.cancel("prefill", peer, key)
            case ev.SwitchLocal(key=key, decode=peer):
                self._world.note(ROUTER, f"→ {peer.worker_id}: switch to local", key)
                self.calls.switch(peer, key)
            case ev.Emit():
                self._emit(request, effect)
            case ev.ReleaseDecode(key=key):
                worker = self.inflight.release_decode(key)
                self._blocked.pop(worker or 0, None)
                self.poke()
            case ev.ReleasePrefill(key=key):
                self.inflight.release_prefill(key)
                self.poke()
            case ev.Requeue():
                self._requeue(request, effect)
            case ev.Rebind():
                self._rebind(request, effect)
            case ev.LeaveQueue():
                self.queue.remove(request.wish.name)
            case ev.EndStream():
                self._fleet.judge.ended(request, effect)

    def _emit(self, request: Request, effect: ev.Emit) -> None:
        self._fleet.judge.emitted(request, effect)
        if request.wish.stop_after and len(request.got) == request.wish.stop_after:
            self._todo[request.wish.name].append(ev.StopMatched())

    # -- queue and policy -----------------------------------------------------------------------------------

    def _requeue(self, request: Request, effect: ev.Requeue) -> None:
        self.queue.requeue(self._waiting(request))
        if effect.blocked is not None:
            self._blocked[effect.blocked] = self.now() + effect.block_s
            self._world.after(effect.block_s, self.poke)
        self.poke()

    def _rebind(self, request: Request, effect: ev.Rebind) -> None:
        """Another prefill worker for a request that a decode worker holds pages for."""
        found = choose_prefill(self._candidates(), self.inflight, effect.decode, effect.avoid, self.policy)
        self._world.note(ROUTER, "looks for another prefill worker:", effect.key, found and found.worker_id)
        rebound = ev.Rebound(key=effect.key, prefill=found)
        self._todo[request.wish.name].append(rebound)

    def _candidates(self) -> list[Candidate]:
        now = self.now()
        known = [(m.record, self.membership.is_usable(m, now)) for m in self.membership.members()]
        if self._world.bias.both_roles:
            known = [(replace(r, role=role), u) for r, u in known for role in (Role.PREFILL, Role.DECODE)]
        return [Candidate(record=record, usable=usable) for record, usable in known]

    def poke(self) -> None:
        if not self._pump_due and len(self.queue):
            self._pump_due = True
            self._world.after(0.0, self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        now = self.now()
        self._blocked = {worker: until for worker, until in self._blocked.items() if until > now}
        candidates = self._candidates()
        while (entry := self.queue.first()) is not None:
            request = self.requests[entry.request_id]
            ask = Ask(prompt_tokens=entry.tokens, avoid=request.state.avoid, blocked=frozenset(self._blocked))
            choice = choose(candidates, self.inflight, ask, self.policy)
            if not isinstance(choice, Choice):
                return
            self.queue.take(entry.request_id, now)
            self.step(entry.request_id, ev.Assigned(decode=choice.decode, prefill=choice.prefill))

    # -- sending --------------------------------------------------------------------------------------------

    def _send_reserve(self, request: Request, effect: ev.SendReserve) -> None:
        self._fleet.add_attempt(request, effect)
        rows = len(request.wish.prompt) + request.wish.max_tokens
        prefill = effect.decode if effect.prefill is None else effect.prefill
        self.inflight.add(
            effect.key, decode=effect.decode.incarnation, prefill=prefill.incarnation,
            prefill_tokens=len(effect.token_ids), decode_tokens=rows,
        )  # fmt: skip
        ticket = self._ticket[request.wish.name] = self._mint(request, effect)
        if ticket is None:
            lost = ev.DecodeBroken(key=effect.key, label="worker_lost", message=LOST_MESSAGE)
            self._todo[request.wish.name].append(lost)
            return
        message = Reserve(
            **self._common(request, effect, ticket), receiver_incarnation=effect.decode.incarnation,
            mode=effect.mode, prefill=effect.prefill,
        )  # fmt: skip
        self._world.note(ROUTER, f"→ {effect.decode.worker_id}:", message)
        self.calls.reserve(effect.decode, message)

    def _send_prefill(self, request: Request, effect: ev.SendPrefill) -> None:
        ticket = self._ticket[request.wish.name]
        if ticket is None:
            return
        message = PrefillRequest(
            **self._common(request, effect, ticket), receiver_incarnation=effect.prefill.incarnation,
            decode=effect.decode,
        )  # fmt: skip
        self._world.note(ROUTER, f"→ {effect.prefill.worker_id}:", message)
        self.calls.prefill(effect.prefill, message)

    def _common(
        self, request: Request, effect: ev.SendReserve | ev.SendPrefill, ticket: bytes
    ) -> dict[str, Any]:
        return {
            "key": effect.key, "ticket": ticket, "token_ids": effect.token_ids,
            "num_forced": effect.num_forced, "sampling": request.sampling, "tenant": request.wish.tenant,
            "deadline_s": max(0.0, request.deadline_at - self._world.now),
            "priority": request.wish.priority,
        }  # fmt: skip

    def _mint(self, request: Request, effect: ev.SendReserve) -> bytes | None:
        decode = self.membership.member(effect.decode.worker_id, effect.decode.incarnation)
        peer = effect.prefill
        prefill = None if peer is None else self.membership.member(peer.worker_id, peer.incarnation)
        if decode is None or (peer is not None and prefill is None):
            return None
        return self._tickets.ticket(
            effect, decode=decode, prefill=prefill, sampling=request.sampling, tenant=request.wish.tenant,
            now=self.now(), remaining_s=max(0.0, request.deadline_at - self._world.now),
        )  # fmt: skip


def is_queued(request: Request) -> bool:
    return request.state.phase is Phase.QUEUED


Submit = Callable[[Wish], Request | None]
