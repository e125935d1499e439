"""A virtual fleet: the production's pure code on a virtual clock and a simulated network, one seed one run.

What lives here: the event heap, ordered links, workers whose "KV" are hashes of token prefixes, a router
around the production lifecycle and policy. What does not: any decision of its own; faults (a later issue).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode_worker.loop import DecodeRole
from kvtransfer import effects as fx
from kvtransfer import ticket
from kvtransfer.session.guard import RoleContext
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.manager import PageManager
from pdserve.messages import PrefillRequest, Refused, Reserve
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import CapabilityRecord, ModelLimits, PageName, PeerRef, Role, SamplingParams, WorkerRecord
from pdserve.worker.core import WorkerCore
from prefill_worker.loop import PrefillRole
from router import events as ev
from router import lifecycle
from router.inflight import InFlight
from router.policy import Ask, Candidate, Choice, PolicyConfig, choose
from router.request_state import Phase, RequestState
from tests.simulation.model import END_TOKEN, VOCAB, make_row, next_token, token_of

SECRET = b"simulation-secret-of-32-bytes...."
TENANT = "sim"


class World:
    """Virtual time and ordered, delayed links."""

    def __init__(self, seed: int, loss: float = 0.0) -> None:
        """loss: share of the messages between workers that never arrive."""
        self.rng = random.Random(seed)
        self.loss, self.lost = loss, 0
        self.now = 0.0
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._last: dict[tuple[str, str], float] = {}

    def after(self, delay: float, what: Callable[[], None]) -> None:
        """Runs `what` after a delay, seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, what))

    def send(self, source: str, target: str, what: Callable[[], None]) -> None:
        """Delivers on the link from source to target: random delay, in order."""
        at = self.now + self.rng.uniform(0.0001, 0.01)
        at = max(at, self._last.get((source, target), 0.0))
        self._last[source, target] = at
        self.after(at - self.now, what)

    def note(self, text: str) -> None:
        """Adds a line to the trace that a failing seed prints."""
        self.trace.append(f"{self.now:9.4f} {text}")

    def run(self, until: Callable[[], bool], limit_s: float = 600.0) -> int:
        """Runs events until the condition holds; returns how many. Fails when virtual time runs out."""
        events = 0
        while not until():
            assert self._heap, "nothing left to happen, and not done"
            self.now, _, what = heapq.heappop(self._heap)
            assert self.now < limit_s, "virtual time is up"
            what()
            events += 1
        return events


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What differs between simulated workers."""

    role: Role
    num_pages: int
    page_size: int
    chunk_tokens: int
    max_num_seqs: int = 8
    local_threshold: int = 0


class SimWorker:
    """One worker: the production core, with hashes for KV and delays for compute and copies."""

    def __init__(self, world: World, name: str, shape: WorkerShape) -> None:
        self.world, self.name, self.shape = world, name, shape
        self.incarnation = world.rng.getrandbits(63) | 1
        self.peers: dict[str, SimWorker] = {}
        self.router: SimRouter
        self.pages = PageManager(shape.num_pages, world.rng.getrandbits(63))
        self.content: list[list[int]] = [[] for _ in range(shape.num_pages)]
        self.header = [0] * shape.num_pages
        self.moved = 0
        scheduler = StepScheduler(self._sched_config(), self.pages)
        context = self._context()
        self.prefill = PrefillRole(context, self.pages, scheduler)
        self.decode = DecodeRole(context, self.pages, scheduler, page_bytes=1)
        self.core = WorkerCore(self.pages, scheduler, [self.prefill, self.decode])
        self._timer_at = float("inf")

    def _context(self) -> RoleContext:
        return RoleContext(
            worker_id=self.name, incarnation=self.incarnation, page_size=self.shape.page_size,
            max_context=self.shape.page_size * self.shape.num_pages, model="m", numerics="n", secret=SECRET,
            local_prefill_threshold=self.shape.local_threshold, growth_tokens=8,
            max_num_seqs=self.shape.max_num_seqs, decode_pace_s=0.02,
        )  # fmt: skip

    def _sched_config(self) -> SchedConfig:
        return SchedConfig(
            page_size=self.shape.page_size, chunk_tokens=self.shape.chunk_tokens,
            token_budget=2 * self.shape.chunk_tokens, max_num_seqs=self.shape.max_num_seqs,
            deterministic=True, floor_pages=0, prefix_caching=True, end_token_ids=(END_TOKEN,), model="m",
            numerics="n",
        )  # fmt: skip

    @property
    def record(self) -> WorkerRecord:
        peer = PeerRef(worker_id=self.name, incarnation=self.incarnation, control=self.name)
        capability = CapabilityRecord(
            layout="l", numerics="n", model="m", tokenizer="t", dtype="float32",
            page_size=self.shape.page_size, page_bytes=1, transports=("tcp",),
        )  # fmt: skip
        limits = ModelLimits(
            vocab_size=VOCAB, max_context=10_000, end_token_ids=(END_TOKEN,), bos_token_id=None
        )
        return WorkerRecord(
            peer=peer, role=self.shape.role, capability=capability, limits=limits, model_name="m",
            pool_pages=self.shape.num_pages, page_size=self.shape.page_size,
        )  # fmt: skip

    # -- driver -----------------------------------------------------------------------------------------

    def feed(self, make: Callable[[float], list[fx.Effect]]) -> None:
        """What pdserve.worker.driver does, in virtual time."""
        self._apply(lambda now: self.core.settle(make(now), now))

    def _apply(self, make: Callable[[float], list[fx.Effect]]) -> None:
        for effect in make(self.world.now):
            self._do(effect)
        problem = self.core.check_integrity()
        assert not problem, f"{self.name}: {problem}"
        self._arm()

    def _arm(self) -> None:
        due = self.core.next_timer()
        if due < self._timer_at:
            self._timer_at = due
            self.world.after(max(0.0, due - self.world.now), self._tick)

    def _tick(self) -> None:
        self._timer_at = float("inf")
        self._apply(self.core.tick)

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ToDecoder(peer=peer, message=message):
                target = self.peers[peer]
                self._to(target, lambda now: target.decode.message(self.name, self.incarnation, message, now))
            case fx.ToPrefiller(peer=peer, message=message):
                target = self.peers[peer]
                self._to(
                    target, lambda now: target.prefill.message(self.name, self.incarnation, message, now)
                )
            case fx.AnswerPrefill(message=message) | fx.AnswerDecode(message=message):
                who = "prefill" if isinstance(effect, fx.AnswerPrefill) else "decode"
                self.world.note(f"{self.name} → router ({who}): {type(message).__name__} {effect.key}")
                self.world.send(self.name, "router", lambda: self.router.heard(who, effect.key, message))
            case fx.StartRead():
                self.world.after(self.world.rng.uniform(0.0001, 0.02), lambda: self._read(effect))
            case fx.ComputeDigest():
                self.world.after(self.world.rng.uniform(0.0001, 0.005), lambda: self._digest(effect))
            case fx.RunStep(plan=plan):
                self.world.after(self.world.rng.uniform(0.001, 0.05), lambda: self._step(plan))
            case fx.SetGenerations(updates=updates):
                for page, generation in updates:
                    self.header[page] = generation

    def _to(self, target: SimWorker, make: Callable[[float], list[fx.Effect]]) -> None:
        if self.world.loss and self.world.rng.random() < self.world.loss:
            self.world.lost += 1
            return
        self.world.send(self.name, target.name, lambda: target.feed(make))

    # -- data plane and engine --------------------------------------------------------------------------

    def page_digest(self, page: int, index: int, valid_rows: int) -> bytes:
        """Byte digest of a page's hashes."""
        text = repr((self.content[page], index, valid_rows))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def _digest(self, effect: fx.ComputeDigest) -> None:
        page: PageName = effect.page
        digest = self.page_digest(page.page, effect.index, effect.valid_rows)
        self.feed(lambda now: self.prefill.digested(effect.key, effect.index, page, digest, now))

    def _read(self, effect: fx.StartRead) -> None:
        source = self.peers[effect.peer.worker_id]
        name = effect.source
        status = ReadStatus.STALE
        if source.header[name.page] == name.generation and source.pages.allocator.pool_id == name.pool_id:
            self.content[effect.target_page] = list(source.content[name.page])
            got = self.page_digest(effect.target_page, effect.index, effect.valid_rows)
            status = ReadStatus.GOOD if got == effect.digest else ReadStatus.MISMATCH
            self.moved += 1
        self.feed(lambda now: self.decode.read_done(effect.read_id, status, b"", "sim", now))

    def _step(self, plan: StepPlan) -> None:
        size = self.shape.page_size
        for page in plan.zero_pages:
            self.content[page] = []
        for source, target in plan.copies:
            self.content[target] = list(self.content[source])
        tokens: dict[str, int] = {}
        for seq in plan.seqs:
            prefix = self._prefix_of(seq.pages, seq.start)
            for offset, token in enumerate(seq.token_ids):
                row = seq.start + offset
                prefix = (*prefix, token)
                page = self.content[seq.pages[row // size]]
                assert len(page) == row % size, f"{self.name}: {seq.seq_id} row {row} over others' rows"
                page.append(make_row(prefix))
            if seq.sample:
                tokens[seq.seq_id] = next_token(prefix)
        result = StepResult(step_id=plan.step_id, tokens=tokens)
        self._apply(lambda now: self.core.step_done(result, now))

    def _prefix_of(self, pages: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """The tokens the block table's rows were computed from: S1 is about exactly these."""
        size = self.shape.page_size
        return tuple(
            token_of(self.content[pages[row // size]][row % size], row, self.content, pages, size)
            for row in range(rows)
        )


@dataclass(slots=True, kw_only=True)
class SimRequest:
    """One client request and what came back."""

    state: RequestState
    sampling: SamplingParams
    got: list[int] = field(default_factory=list)
    ended: ev.EndStream | None = None
    avoid: frozenset[int] = frozenset()


class SimRouter:
    """The production lifecycle and policy, with calls as messages of the virtual network."""

    def __init__(self, world: World, workers: list[SimWorker], threshold: int = 0) -> None:
        self.world = world
        self.workers = {w.incarnation: w for w in workers}
        self.requests: dict[str, SimRequest] = {}
        self.load = InFlight()
        self.blocked: dict[int, float] = {}
        self.config = PolicyConfig(local_prefill_threshold=threshold)
        for worker in workers:
            worker.router = self
            worker.peers = {w.name: w for w in workers}

    @property
    def done(self) -> bool:
        return all(r.ended is not None for r in self.requests.values())

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        """A client's request arrives."""
        state = RequestState(
            request_id=request_id, prompt=prompt, max_tokens=max_tokens, stop_ids=frozenset({END_TOKEN})
        )
        self.requests[request_id] = SimRequest(state=state, sampling=SamplingParams(max_tokens=max_tokens))
        self._assign(request_id)

    def cancel(self, request_id: str) -> None:
        """The client goes away."""
        self._step(request_id, ev.ClientGone())

    def heard(self, who: str, key: Any, message: Any) -> None:
        """A worker's answer arrived."""
        if who == "prefill" and isinstance(message, Refused):
            message = ev.PrefillRefused(refused=message)
        self._step(key.request_id, message)

    def _assign(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request.state.phase is not Phase.QUEUED:
            return
        candidates = [Candidate(record=w.record, usable=True) for w in self.workers.values()]
        state = request.state
        blocked = frozenset(i for i, until in self.blocked.items() if until > self.world.now)
        ask = Ask(prompt_tokens=len(state.prompt), avoid=request.avoid, blocked=blocked)
        choice = choose(candidates, self.load, ask, self.config)
        if not isinstance(choice, Choice):
            self.world.after(0.05, lambda: self._assign(request_id))
            return
        self._step(request_id, ev.Assigned(decode=choice.decode, prefill=choice.prefill))
        assert state.key is not None
        self.load.add(
            state.key, decode=choice.decode.incarnation,
            prefill=(choice.prefill or choice.decode).incarnation, prefill_tokens=len(state.prompt),
            decode_tokens=len(state.prompt) + state.max_tokens,
        )  # fmt: skip

    def _step(self, request_id: str, event: Any) -> None:
        request = self.requests[request_id]
        for effect in lifecycle.step(request.state, event):
            self._do(request, effect)

    def _do(self, request: SimRequest, effect: ev.Effect) -> None:
        match effect:
            case ev.SendReserve() | ev.SendPrefill():
                self._send(request, effect)
            case ev.CancelDecode(key=key, decode=peer):
                worker = self.workers[peer.incarnation]
                self._to(worker, lambda now: worker.decode.cancel(key, now)[1])
            case ev.CancelPrefill(key=key, prefill=peer):
                worker = self.workers[peer.incarnation]
                self._to(worker, lambda now: worker.prefill.cancel(key, now)[1])
            case ev.SwitchLocal(key=key, decode=peer):
                worker = self.workers[peer.incarnation]
                self._to(worker, lambda now: worker.decode.switch_local(key, now)[1])
            case ev.Emit(index=index, token_id=token_id):
                assert index == len(request.got), "a token twice or missing (S2)"
                request.got.append(token_id)
            case ev.ReleaseDecode(key=key):
                self.load.release_decode(key)
            case ev.ReleasePrefill(key=key):
                self.load.release_prefill(key)
            case ev.Requeue():
                self._requeue(request, effect)
            case ev.EndStream():
                assert request.ended is None, "two terminal statuses (S2)"
                request.ended = effect

    def _requeue(self, request: SimRequest, effect: ev.Requeue) -> None:
        request.avoid = effect.avoid
        if effect.blocked is not None:
            self.blocked[effect.blocked] = self.world.now + effect.block_s
        self.world.after(0.0, lambda: self._assign(request.state.request_id))

    def _to(self, worker: SimWorker, make: Callable[[float], list[fx.Effect]]) -> None:
        self.world.send("router", worker.name, lambda: worker.feed(make))

    def _send(self, request: SimRequest, effect: ev.SendReserve | ev.SendPrefill) -> None:
        common: dict[str, Any] = {
            "key": effect.key, "ticket": self._mint(request, effect), "token_ids": effect.token_ids,
            "num_forced": effect.num_forced, "sampling": request.sampling, "tenant": TENANT,
            "deadline_s": 500.0,
        }  # fmt: skip
        if isinstance(effect, ev.SendReserve):
            decode = self.workers[effect.decode.incarnation]
            call = Reserve(
                **common, receiver_incarnation=decode.incarnation, mode=effect.mode, prefill=effect.prefill
            )
            self._to(decode, lambda now: decode.decode.reserve(call, now))
            return
        worker = self.workers[effect.prefill.incarnation]
        half = PrefillRequest(**common, receiver_incarnation=worker.incarnation, decode=effect.decode)
        self._to(worker, lambda now: worker.prefill.prefill(half, now))

    def _mint(self, request: SimRequest, effect: ev.SendReserve | ev.SendPrefill) -> bytes:
        facts = ticket.TicketFacts(
            key=effect.key, prefill_incarnation=effect.prefill.incarnation if effect.prefill else 0,
            decode_incarnation=effect.decode.incarnation, emitter=effect.decode.worker_id,
            mode=request.state.mode, tenant=TENANT,
            request_hash=ticket.request_hash(effect.token_ids, request.sampling), page_budget=1000,
            num_choices=1, prefill_expires=1e6, decode_expires=1e6,
        )  # fmt: skip
        return ticket.mint(SECRET, facts)
