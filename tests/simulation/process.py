"""One incarnation of a worker: the production core, with row numbers for KV and delays for compute and
copies.

It does what `pdserve.worker.driver` and the role services do around the core, in virtual time: feeds
inputs with its own clock, carries effects out in order, keeps the timer, and holds everything back while
it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from decode_worker.loop import DecodeRole
from kvtransfer import effects as fx
from kvtransfer.plan import ReplicaLayout, layout_text
from kvtransfer.plan.order import PLAIN
from kvtransfer.session.guard import RoleContext
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.layout import PageLayout, pages_for
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Envelope
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import Role, WorkerLoad
from pdserve.worker.core import WorkerCore
from prefill_worker.digests import last_pages
from prefill_worker.loop import PrefillRole
from tests.simulation.bias import LEASE_S
from tests.simulation.calls import Calls
from tests.simulation.compute import Compute
from tests.simulation.dataplane import Memory, Read, may_outlast_lease
from tests.simulation.model import END_TOKEN

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet

LONGEST_ROWS = 40 + 12 + 24
"""The longest prompt and completion that a run asks for."""
MAX_RANKS = 2
SECRET = b"simulation-secret-of-32-bytes...."
Effects = list[fx.Effect]
Input = Callable[[float], Effects]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What differs between simulated workers."""

    role: Role
    num_pages: int
    page_size: int
    chunk_tokens: int
    max_num_seqs: int
    local_threshold: int
    credit_pages: int
    num_ranks: int


def layout(page_size: int, num_ranks: int) -> str:
    """The text of a layout: of as many heads as ranks may be, so that each is read."""
    heads = [range(MAX_RANKS)] if num_ranks == 1 else [range(rank, rank + 1) for rank in range(MAX_RANKS)]
    pages = PageLayout(
        num_layers=1, num_kv_heads=MAX_RANKS, head_dim=1, page_size=page_size, dtype="float32", inner=PLAIN
    )
    return layout_text(ReplicaLayout.of(pages, heads))


class Process:
    """One incarnation. `later` is how anything in it happens: not when it is dead, not while it is
    stopped."""

    def __init__(self, fleet: Fleet, name: str, shape: Shape) -> None:
        world = fleet.world
        self.fleet, self.world, self.name, self.shape = fleet, world, name, shape
        self.clock = fleet.clocks[name]
        self.incarnation = world.rng.getrandbits(63) | 1
        self.alive, self.stopped = True, False
        self.born_at = world.now
        self.inbox = 0  # messages that came while it was stopped and are not handled yet
        self._held_back: list[tuple[bool, Callable[[], None]]] = []
        self.pages = PageManager(shape.num_pages, world.rng.getrandbits(63))
        self.memory = Memory(shape.num_pages, shape.page_size, self.pages.allocator.pool_id)
        self.scheduler = StepScheduler(self._sched_config(), self.pages)
        self.context = self._context()
        self.prefill = PrefillRole(self.context, self.pages, self.scheduler)
        self.decode = DecodeRole(self.context, self.pages, self.scheduler, page_bytes=1)
        self.core = WorkerCore(self.pages, self.scheduler, self._roles(), max_gap_s=self.context.gap_s)
        self.calls = Calls(self)
        self.compute = Compute(self)
        self.reads: dict[int, Read] = {}
        self.slow: dict[str, float] = {}
        self._timer_at = float("inf")
        self._timer_id = 0
        fleet.judge.watch(self)

    def _roles(self) -> list[Any]:
        by_role = {Role.PREFILL: [self.prefill], Role.DECODE: [self.decode]}
        return by_role.get(self.shape.role, [self.prefill, self.decode])

    def _context(self) -> RoleContext:
        shape = self.shape
        rows = shape.page_size * shape.num_pages
        floor = pages_for(LONGEST_ROWS, shape.page_size) if shape.role is Role.AGGREGATED else 0
        facts: dict[str, Any] = {
            "worker_id": self.name, "incarnation": self.incarnation, "page_size": shape.page_size,
            "max_context": rows, "model": "m", "numerics": "n", "secret": SECRET, "lease_s": LEASE_S,
            "local_prefill_threshold": shape.local_threshold, "growth_tokens": 8,
            "max_num_seqs": shape.max_num_seqs, "decode_pace_s": 0.02, "credit_pages": shape.credit_pages,
            "floor_pages": min(floor, shape.num_pages // 2), "num_ranks": shape.num_ranks,
            "layout": layout(shape.page_size, shape.num_ranks),
        }  # fmt: skip
        known = {field.name for field in fields(RoleContext)}
        return RoleContext(**{name: value for name, value in facts.items() if name in known})

    def _sched_config(self) -> SchedConfig:
        shape = self.shape
        return SchedConfig(
            page_size=shape.page_size, chunk_tokens=shape.chunk_tokens, token_budget=2 * shape.chunk_tokens,
            max_num_seqs=shape.max_num_seqs, deterministic=True, floor_pages=0, prefix_caching=True,
            end_token_ids=(END_TOKEN,), model="m", numerics="n",
        )  # fmt: skip

    # -- time -----------------------------------------------------------------------------------------------

    def now(self) -> float:
        """What this process's monotonic clock says."""
        return self.clock.local(self.world.now)

    def later(self, delay: float, what: Callable[[], None], *, tick: bool = False) -> None:
        """Something happens in this process after a delay (true seconds)."""
        self.world.after(delay, lambda: self._happen(what, tick))

    def _happen(self, what: Callable[[], None], tick: bool) -> None:
        if self.stopped:
            self._held_back.append((tick, what))
        elif self.alive:
            what()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.world.note(self.name, "is stopped")

    def go_on(self) -> None:
        """SIGCONT: what came meanwhile is handled, timers after it."""
        if not (self.alive and self.stopped):
            return
        self.stopped = False
        self.world.note(self.name, "goes on")
        waiting, self._held_back = self._held_back, []
        messages, ticks = [w for tick, w in waiting if not tick], [w for tick, w in waiting if tick]
        self.inbox = len(messages)
        read = [*messages, lambda: setattr(self, "inbox", 0)]
        for what in (*ticks, *read) if self.ticks_first() else (*read, *ticks):
            self.later(0.0, what)

    def ticks_first(self) -> bool:
        """What `pdserve.worker.driver` must never do: fire timers before it has read what arrived."""
        return False

    def die(self) -> None:
        """The process is gone. Mapped memory stays for those who copy out of it."""
        self.alive = self.stopped = False
        self._held_back.clear()

    def unreachable_by(self, other: Process) -> bool:
        return not self.alive or self.stopped or self.fleet.network.cut(self.name, other.name)

    # -- driver ---------------------------------------------------------------------------------------------

    def feed(self, make: Input) -> None:
        """Runs an input of the core now and carries its effects out."""
        self.apply(lambda now: self.core.settle(make(now), now))

    def apply(self, make: Input) -> None:
        self.world.num_events += 1
        now = self.now()
        with self.fleet.judge.engine(self):
            effects = make(now)
        self.fleet.judge.settled(self)
        for effect in effects:
            self._do(effect)
        self.fleet.judge.after_input(self)
        self._arm(now)

    def _arm(self, now: float) -> None:
        due = self.core.next_timer()
        if due >= self._timer_at > now:
            return
        self._timer_id += 1
        self._timer_at = due
        if due != float("inf"):
            mine, delay = self._timer_id, max(0.0, self.clock.true(due) - self.world.now) + 1e-9
            self.later(delay, lambda: self._tick(mine), tick=True)

    def _tick(self, mine: int) -> None:
        if mine == self._timer_id:
            self._timer_at = float("inf")
            self.apply(self.core.tick)

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ToDecoder(peer=peer) | fx.ToPrefiller(peer=peer):
                self._send(peer, effect)
            case fx.AnswerPrefill() | fx.AnswerDecode():
                self.calls.answer(effect)
            case fx.StartRead():
                self._start_read(effect)
            case fx.CancelRead():
                if effect.read_id in self.reads:
                    self.reads[effect.read_id].cancel()
            case fx.ComputeDigest():
                self.later(self._digest_time(), lambda: self._digest(effect))
            case fx.RunStep(plan=plan):
                self._run_step(plan)
            case fx.SetGenerations(updates=updates):
                for page, generation in updates:
                    self.memory.generations[page] = generation
            case fx.Count():
                self.world.counters[effect.name] += effect.amount
                self.fleet.judge.counted(self, effect.name)
            case fx.Dial() | fx.Measure():
                pass
            case fx.Retire(reason=reason):
                self.fleet.retire(self, reason)

    # -- messages between workers ---------------------------------------------------------------------------

    def _send(self, peer: str, effect: fx.ToDecoder | fx.ToPrefiller) -> None:
        envelope = Envelope(
            sender=self.name, sender_incarnation=self.incarnation, receiver_incarnation=effect.incarnation,
            message=self.fleet.faults.maybe_forged(effect.message, self.name),
        )  # fmt: skip
        to_decoder = isinstance(effect, fx.ToDecoder)
        self.world.note(self.name, f"→ {peer}:", envelope.message)
        self.fleet.judge.alarmed(self, envelope.message)
        deliver = lambda: self.fleet.deliver(peer, envelope, to_decoder)  # noqa: E731
        self.fleet.network.message(self.name, peer, deliver, envelope.message)

    def receive(self, envelope: Envelope, to_decoder: bool) -> None:
        """An envelope arrived; one for another incarnation is refused."""
        if envelope.receiver_incarnation != self.incarnation and not self.world.masked("incarnation"):
            self.world.counters["foreign_envelopes"] += 1
            return
        role = self.decode if to_decoder else self.prefill
        sender, incarnation = envelope.sender, envelope.sender_incarnation
        self.feed(lambda now: role.message(sender, incarnation, envelope.message, now))

    # -- compute and copies ---------------------------------------------------------------------------------

    def _run_step(self, plan: StepPlan) -> None:
        length = self.world.rng.uniform(0.001, 0.05) * self.world.pace + self.slow.get("step", 0.0)
        writes = length * self.world.rng.random()
        self.later(writes, lambda: self._write(plan, length - writes))

    def _write(self, plan: StepPlan, rest: float) -> None:
        result = self.compute.execute(plan)
        self.later(rest, lambda: self._step_done(plan, result))

    def _step_done(self, plan: StepPlan, result: StepResult) -> None:
        """With the digests of what a prompt's last step wrote, as `prefill_worker.handoff` makes them."""
        written = last_pages(plan, result, self.prefill.owns, self.context.page_size)
        found = [(page, index, self._digest_of(page, index, rows)) for page, index, rows in written]
        self.apply(lambda now: self.prefill.computed(found) + self.core.step_done(result, now))

    def _digest_time(self) -> float:
        return self.world.rng.uniform(0.0001, 0.005) * self.world.pace + self.slow.get("digest", 0.0)

    def _digest(self, effect: fx.ComputeDigest) -> None:
        digest = self._digest_of(effect.page.page, effect.index, effect.valid_rows)
        self.feed(lambda now: self.prefill.digested(effect.key, effect.index, effect.page, digest, now))

    def _digest_of(self, page: int, index: int, valid_rows: int) -> bytes:
        ranks = self.context.num_ranks
        return b"".join(self.memory.digest(page, index, valid_rows, rank, ranks) for rank in range(ranks))

    def read_duration(self, effect: fx.StartRead) -> float:
        rng, bias = self.world.rng, self.world.bias
        if bias.io_longer_than_lease and not self.world.calm and rng.random() < bias.io_longer_than_lease:
            return may_outlast_lease(rng.random())
        slow = max(self.slow.get("read", 0.0), self.fleet.slow_peer(effect.peer.worker_id))
        return rng.uniform(0.0001, 0.02) * self.world.pace + slow * rng.random()

    def maybe_stop_between_check_and_act(self) -> None:
        rng, chance = self.world.rng, self.world.bias.pause_between_check_and_act
        if chance and not self.world.calm and not self.stopped and rng.random() < chance:
            self.fleet.faults.pause(self.name, rng.uniform(0.05, 1.2) * LEASE_S)

    def _start_read(self, effect: fx.StartRead) -> None:
        source = self.fleet.process_of(effect.peer)
        read = Read(self, source, effect, self.fleet.path(self.name, effect.peer.worker_id))
        self.reads[effect.read_id] = read
        read.start()

    def read_ended(self, read: Read, status: ReadStatus, digest: bytes) -> None:
        """Called by a read, once."""
        effect = read.effect
        del self.reads[effect.read_id]
        self.world.note(
            self.name, f"read {effect.read_id} of page index {effect.index}: {status}", effect.key
        )
        self.fleet.judge.read_ended(self, read, status)
        self.feed(lambda now: self.decode.read_done(effect.read_id, status, digest, read.path, now))

    # -- what it tells others -------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """What the heartbeat says."""
        return WorkerLoad(
            num_pages=self.pages.num_pages, num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting, draining=self.core.draining,
            ready=not self.core.over_quarantine,
        )  # fmt: skip
