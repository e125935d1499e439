"""The simulated fleet: worker processes that come and go under constant names, one router, one network.

What lives here: who exists, how an envelope finds its process, heartbeats, restarts. What does not: what
goes wrong and when (`faults`), what must hold (`invariants`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pdserve.messages import Envelope
from pdserve.types import CapabilityRecord, Key, ModelLimits, PeerRef, Role, WorkerRecord
from router import events as ev
from tests.simulation.bias import HEARTBEAT_S
from tests.simulation.faults import Faults
from tests.simulation.invariants import Judge
from tests.simulation.model import END_TOKEN, VOCAB
from tests.simulation.network import Network
from tests.simulation.process import Process, Shape
from tests.simulation.router import ROUTER, Request, SimRouter
from tests.simulation.world import ProcessClock, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try as the router sent it out. rows: of the prompt and the forced tokens."""

    key: Key
    tenant: str
    num_prompt: int
    sampled: bool
    rows: list[int]
    decode: str
    prefill: str
    decode_incarnation: int
    prefill_incarnation: int


class Fleet:
    """All processes of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.network = Network(world)
        self.judge = Judge(self)
        self.faults = Faults(self)
        self.samples: dict[tuple[Key, int], set[tuple[int, int]]] = {}
        self._attempts: dict[str, Attempt] = {}
        self.num_ranks = world.bias.num_ranks or 1 + (world.seed % 4 == 3)
        self.shapes = self._draw_shapes()
        self.clocks = {name: self._draw_clock() for name in self.shapes}
        self._paths: dict[tuple[str, str], str] = {}
        self.processes: dict[str, Process] = {}
        self._by_incarnation: dict[int, Process] = {}
        self.router = SimRouter(self, world.rng.uniform(0, 7200.0))
        for name in self.shapes:
            self.start(name)
            world.after(world.rng.uniform(0.0, HEARTBEAT_S), lambda n=name: self._heartbeat(n))  # type: ignore[misc]

    def _draw_shapes(self) -> dict[str, Shape]:
        """At least 2P2D, some with one more, of a role or aggregated. Pools too small for comfort."""
        rng, bias = self.world.rng, self.world.bias
        page_size = rng.choice((2, 4, 8))
        tight = self.world.tight
        common: dict[str, Any] = {
            "page_size": page_size, "chunk_tokens": page_size * (1 if tight else rng.choice((1, 2, 4))),
            "max_num_seqs": 8 if tight else rng.choice((3, 8)), "local_threshold": rng.choice((0, 0, 6)),
            "credit_pages": rng.choice((1, 2, 3, 256)), "num_ranks": self.num_ranks,
        }  # fmt: skip
        rows = rng.randint(72, 90 if bias.reuse_at_once or tight else 180)
        rows += 30 if bias.both_roles else 0
        pages = bias.num_pages or -(-rows // page_size)
        roles = [Role.AGGREGATED] * 2 if bias.both_roles else [Role.PREFILL] * 2 + [Role.DECODE] * 2
        extra = rng.choice((None, None, None, Role.PREFILL, Role.DECODE, Role.AGGREGATED))
        roles += [extra] if extra and not bias.both_roles else []
        small = min(pages, -(-52 // page_size)) if tight and not bias.num_pages else pages
        sizes = {Role.PREFILL: small}
        return {
            f"{role}-{i}": self._recut(Shape(role=role, num_pages=sizes.get(role, pages), **common))
            for i, role in enumerate(roles)
        }

    def _recut(self, shape: Shape) -> Shape:
        """In some fleets prefill workers have pages of another size, or ranks alone: pages are re-laid."""
        seed, bias = self.world.seed, self.world.bias
        bridged = bias.bridged if bias.bridged is not None else seed % 5 in (1, 3) and not bias.both_roles
        if not bridged or shape.role is not Role.PREFILL:
            return shape
        size = {2: 4, 4: 8, 8: 2}[shape.page_size] if seed % 2 else {2: 8, 4: 2, 8: 4}[shape.page_size]
        rows = shape.page_size * shape.num_pages
        ranks = self.num_ranks if bias.num_ranks else 1 + seed // 5 % 2
        return replace(
            shape, page_size=size, num_pages=-(-rows // size), num_ranks=ranks,
            chunk_tokens=max(shape.chunk_tokens, size),
        )  # fmt: skip

    def _draw_clock(self) -> ProcessClock:
        rng = self.world.rng
        clock = ProcessClock(
            offset=rng.uniform(3600.0, 10800.0), rate=rng.choice((1.0, rng.uniform(0.9, 1.1)))
        )
        if clock.rate != 1.0:
            self.world.faults["clock_rate"] += 1
        return clock

    # -- processes ------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """A new incarnation under an old name: another pool id, an empty cache."""
        process = Process(self, name, self.shapes[name])
        self.processes[name] = process
        self._by_incarnation[process.incarnation] = process
        self.world.note(name, f"starts as {process.incarnation:016x}")
        self._tell_router(process, first=True)

    def kill(self, name: str, *, back_after: float) -> None:
        """kill -9, and a restart later. Connections are reset, unless the other end is out of reach."""
        process = self.processes[name]
        process.die()
        self.world.note(name, "dies")
        self.router.calls.break_all(name, told_after=2.0 if self.network.cut(name, ROUTER) else 0.3)
        self.world.after(back_after, lambda: None if self.processes[name].alive else self.start(name))

    def retire(self, process: Process, reason: str) -> None:
        """The core says that this incarnation is over: the driver ends the process, the fleet starts a new
        one."""
        if process.alive and self.processes[process.name] is process:
            self.world.counters["retired"] += 1
            self.judge.retired(process)
            self.world.note(process.name, f"retires: {reason}")
            self.kill(process.name, back_after=self.world.rng.uniform(0.05, 0.5))

    def process_of(self, peer: PeerRef) -> Process | None:
        """The incarnation meant, dead or alive."""
        return self._by_incarnation.get(peer.incarnation)

    def path(self, reader: str, source: str) -> str:
        """The transport of a pair."""
        pair = (reader, source)
        if pair not in self._paths:
            self._paths[pair] = self.world.bias.transport or self.world.rng.choice(("shm", "tcp"))
        return self._paths[pair]

    def slow_peer(self, name: str) -> float:
        return self.processes[name].slow.get("read", 0.0)

    def corrupts(self, reader: str, source: str) -> bool:
        """Whether the wire between these flips a byte now."""
        return self.faults.corrupts(reader, source)

    # -- messages -------------------------------------------------------------------------------------------

    def deliver(self, name: str, envelope: Envelope, to_decoder: bool) -> None:
        """An envelope reaches an address; whoever lives there now takes it."""
        process = self.processes[name]
        process.later(0.0, lambda: process.receive(envelope, to_decoder))

    def _heartbeat(self, name: str) -> None:
        process = self.processes[name]
        if process.alive and not process.stopped:
            self._tell_router(process, first=False)
            self.judge.look(process)
        self.world.after(HEARTBEAT_S, lambda: self._heartbeat(name))

    def _tell_router(self, process: Process, *, first: bool) -> None:
        record, load, now, router = self._record(process), process.load(), process.now(), self.router

        def deliver() -> None:
            if first:
                router.register(record, now)
            else:
                router.heartbeat(record, load, now)

        if first or not self.network.cut(process.name, ROUTER):
            self.network.stream(process.name, ROUTER, deliver)

    def _record(self, process: Process) -> WorkerRecord:
        shape = process.shape
        capability = CapabilityRecord(
            layout="l", numerics="n", model="m", tokenizer="t", dtype="float32", page_size=shape.page_size,
            page_bytes=1, transports=("shm", "tcp"), pages=process.context.layout,
        )  # fmt: skip
        limits = ModelLimits(
            vocab_size=VOCAB, max_context=10_000, end_token_ids=(END_TOKEN,), bos_token_id=None
        )
        peer = PeerRef(
            worker_id=process.name, incarnation=process.incarnation, control=process.name,
            layout=process.context.layout,
        )  # fmt: skip
        return WorkerRecord(
            peer=peer, role=shape.role, capability=capability, limits=limits, model_name="m",
            pool_pages=shape.num_pages, page_size=shape.page_size,
        )  # fmt: skip

    # -- what requests are ----------------------------------------------------------------------------------

    def add_attempt(self, request: Request, effect: ev.SendReserve) -> None:
        """A try goes out: from now on this is what its key stands for."""
        wish, prefill = request.wish, effect.prefill or effect.decode
        self._attempts[str(effect.key)] = Attempt(
            key=effect.key, tenant=wish.tenant, num_prompt=len(wish.prompt), sampled=wish.sampled,
            rows=self.world.texts.chain(wish.tenant, (*wish.prompt, *request.got)),
            decode=effect.decode.worker_id, prefill=prefill.worker_id,
            decode_incarnation=effect.decode.incarnation, prefill_incarnation=prefill.incarnation,
        )  # fmt: skip

    def attempt(self, seq_id: str) -> Attempt:
        return self._attempts[seq_id[2:]]

    def is_poisoned(self, seq_id: str) -> bool:
        return self.faults.is_poisoned(self.attempt(seq_id).key.request_id)
