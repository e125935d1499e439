"""What goes wrong and when, drawn from the seed: episodes that begin and end, and bytes that change.

Single messages are struck in `network`. What must hold nevertheless is in `invariants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pdserve.kvcache.allocator import CACHE, Holder, HolderKind
from pdserve.messages import Announce, TransferMessage
from pdserve.types import Role
from tests.simulation.bias import KEEPALIVE_S, KINDS, LEASE_S
from tests.simulation.router_calls import ROUTER

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet
    from tests.simulation.process import Process

STORM_S = 14.0
LATE_STREAM_S = 0.3
OFTEN = ("partition", "partition", "partition_oneway", "slow_read", "slow_read")
"""Drawn more often than the others, as they matter only when something is under way."""


class Faults:
    """The faults of one run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._world = fleet, fleet.world
        self._wires: Counter[tuple[str, str]] = Counter()
        self._poisoned: set[str] = set()
        self._forging: Counter[str] = Counter()
        self._flipped: set[int] = set()
        self._replaying = -1.0

    def plan(self) -> None:
        """Draws the run's episodes. Called once the fleet stands."""
        rng, bias = self._world.rng, self._world.bias
        drawn = [] if bias.only else [rng.choice(KINDS + OFTEN) for _ in range(rng.randint(4, 9))]
        drawn += [kind for kind, count in bias.episodes for _ in range(count)]
        for kind in drawn:
            begin: Callable[[], None] = getattr(self, f"_{kind}")
            near = rng.choice(self._world.bursts) + rng.uniform(-0.3, 1.5)
            at = near if rng.random() < 0.7 else rng.uniform(0.0, STORM_S * 0.75)
            self._world.after(at, lambda b=begin: self._begin(b))  # type: ignore[misc]

    def _begin(self, begin: Callable[[], None]) -> None:
        if not self._world.calm:
            begin()

    # -- helpers --------------------------------------------------------------------------------------------

    def _worker(self, role: Role | None = None) -> Process | None:
        """A living process, by chance; with a role if one has it."""
        alive = [p for p in self._fleet.processes.values() if p.alive and not p.stopped]
        chosen = [p for p in alive if role is None or p.shape.role is role]
        return self._world.rng.choice(chosen) if chosen else None

    def _length(self, longest: float = 1.5) -> float:
        """An episode's length, shorter or longer than a lease, but over before the storm is."""
        left = max(0.01, STORM_S - self._world.now)
        return min(left, self._world.rng.choice((0.2, 1.0, longest)) * LEASE_S * self._world.rng.random())

    def _pair(self) -> tuple[str, str] | None:
        names = [p.name for p in self._fleet.processes.values() if p.shape.role is not Role.DECODE]
        others = [p.name for p in self._fleet.processes.values() if p.shape.role is not Role.PREFILL]
        one, other = self._world.rng.choice(names), self._world.rng.choice(others)
        return None if one == other else (one, other)

    # -- partitions and links -------------------------------------------------------------------------------

    def _partition(self) -> None:
        if pair := self._pair():
            self._cut("partition", [pair, pair[::-1]], self._length(3.0))

    def _partition_oneway(self) -> None:
        if pair := self._pair():
            self._cut(
                "partition_oneway", [pair if self._world.rng.random() < 0.5 else pair[::-1]], self._length()
            )

    def _partition_router(self) -> None:
        worker = self._worker()
        if worker is None:
            return
        there, back = (ROUTER, worker.name), (worker.name, ROUTER)
        links = self._world.rng.choice(([there, back], [there], [back]))
        length = self._length()
        if self._world.rng.random() < 0.5:  # and its clients leave, which it can not hear
            length = self._world.rng.uniform(0.8, 1.5) * LEASE_S
            self._slow_down(worker, "read", self._world.rng.uniform(0.5, 3.0), length)
            self._world.after(self._world.rng.uniform(0.1, 1.5), partial(self._all_leave, worker.name))
        self._cut("partition_router", links, length)
        if length > KEEPALIVE_S:
            breaks = lambda: self._fleet.router.calls.break_all(worker.name, told_after=0.2)  # noqa: E731
            self._world.after(KEEPALIVE_S, breaks)

    def _all_leave(self, name: str) -> None:
        """The clients of all requests that decode on a worker go away."""
        for request in list(self._fleet.router.requests.values()):
            if request.state.decode is not None and request.state.decode.worker_id == name:
                self._fleet.router.client_leaves(request.wish.name)

    def _cut(self, kind: str, links: list[tuple[str, str]], length: float) -> None:
        self._world.fault(
            kind, links[0][0], f"{' and '.join(f'{a}→{b}' for a, b in links)} for {length:.2f} s"
        )
        for source, target in links:
            self._fleet.network.block(source, target)
            self._world.after(length, lambda s=source, t=target: self._fleet.network.unblock(s, t))  # type: ignore[misc]

    def _link_break(self) -> None:
        if worker := self._worker():
            self._world.fault("link_break", worker.name, "router")
            self._fleet.network.disturb(worker.name, ROUTER)
            self._fleet.router.calls.break_all(worker.name, told_after=LATE_STREAM_S)

    # -- processes ------------------------------------------------------------------------------------------

    def _crash(self) -> None:
        if worker := self._worker():
            self._world.fault("crash", worker.name)
            left = max(0.05, STORM_S - self._world.now)
            self._fleet.kill(worker.name, back_after=min(left, self._world.rng.uniform(0.1, LEASE_S)))

    def _pause_short(self) -> None:
        if worker := self._worker():
            length = self._world.rng.uniform(*self._world.bias.short_pause)
            self.pause(worker.name, length * LEASE_S, "pause_short")

    def _pause_long(self) -> None:
        if worker := self._worker():
            self.pause(worker.name, self._world.rng.uniform(1.1, 2.0) * LEASE_S, "pause_long")

    def pause(self, name: str, length: float, kind: str = "pause_short") -> None:
        """Stops a process. Its router notices when that lasts."""
        process = self._fleet.processes[name]
        self._world.fault(kind, name, f"for {length:.2f} s")
        process.stop()
        self._fleet.judge.disturbed(name)
        if length > KEEPALIVE_S:
            breaks = lambda: self._fleet.router.calls.break_all(name, told_after=0.2)  # noqa: E731
            self._world.after(KEEPALIVE_S, breaks)
        self._world.after(length, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        self._fleet.judge.disturbed(process.name)
        process.go_on()

    def _slow(self, what: str, role: Role | None) -> None:
        worker = self._worker(role)
        if worker is None:
            return
        by, length = self._length(), self._length(2.0)
        if what == "read" and self._world.rng.random() < 0.3:
            by = self._world.rng.uniform(2.5, 5.0) * LEASE_S  # for some, longer than until quarantine
        self._slow_down(worker, what, by, length)

    def _slow_down(self, worker: Process, what: str, by: float, length: float) -> None:
        self._world.fault(f"slow_{what}", worker.name, f"by {by:.2f} s for {length:.2f} s")
        worker.slow[what] = by
        self._fleet.judge.disturbed(worker.name, by + length)
        self._world.after(length, lambda: worker.slow.pop(what, None))

    def _slow_step(self) -> None:
        self._slow("step", None)

    def _slow_read(self) -> None:
        self._slow("read", None)

    def _slow_digest(self) -> None:
        self._slow("digest", Role.PREFILL)

    def _drain(self) -> None:
        """A worker is told to drain, and taken out of service when it is empty."""
        worker = self._worker()
        if worker is not None and not worker.core.draining:
            self._world.fault("drain", worker.name)
            worker.core.drain()
            self._world.after(self._length(), lambda: self._drained(worker))

    def _drained(self, worker: Process) -> None:
        if worker.alive and self._fleet.processes[worker.name] is worker:
            if not (worker.core.drained or self._world.calm):
                self._world.after(0.5, lambda: self._drained(worker))
            else:
                self._fleet.kill(worker.name, back_after=0.2)

    # -- bytes ----------------------------------------------------------------------------------------------

    def _corrupt_wire(self) -> None:
        if pair := self._pair():
            source, reader = pair
            length = self._length()
            self._world.note(reader, f"*** fault: bytes from {source} are corrupted for {length:.2f} s")
            self._wires[reader, source] += 1
            self._world.after(length, lambda: self._wires.subtract([(reader, source)]))

    def corrupts(self, reader: str, source: str) -> bool:
        """Whether a page that moves on this wire now is struck."""
        if not self._wires[reader, source] or self._world.rng.random() < 0.25:
            return False
        self._world.fault("corrupt_wire", reader, f"a page from {source}")
        return True

    def _corrupt_source(self) -> None:
        self._flip_soon("corrupt_source", 40)

    def _corrupt_cached(self) -> None:
        self._flip_soon("corrupt_cached", 40)

    def _flip_soon(self, kind: str, tries: int) -> None:
        """Flips a page as soon as there is a fitting one: digested, and in transfer or cached."""
        process = self._worker(Role.PREFILL)
        if process is not None and self._flip(kind, process):
            return
        if tries and not self._world.calm:
            self._world.after(0.1, lambda: self._flip_soon(kind, tries - 1))

    def _flip(self, kind: str, process: Process) -> bool:
        digests, pages = process.prefill._holds._digests._by_page, process.pages
        fits = _in_transfer if kind == "corrupt_source" else _only_cached
        fitting = [
            page
            for page, (name, _, _) in digests.items()
            if pages.name(page) == name and fits(pages.holders(page)) and process.memory.rows[page][0] > 0
        ]
        if not fitting:
            return False
        page = self._world.rng.choice(fitting)
        rows = process.memory.rows[page]
        self._world.fault(kind, process.name, f"page {page}")
        rows[0] = -rows[0] - 1
        self._flipped.add(process.incarnation)
        return True

    def flips_in(self, process: Process) -> bool:
        """Whether a fault changed bytes in this process's own pool."""
        return process.incarnation in self._flipped

    # -- requests and messages ------------------------------------------------------------------------------

    def _poison(self) -> None:
        """The computation of one request fails."""
        live = [name for name, request in self._fleet.router.requests.items() if request.end is None]
        if live:
            name = self._world.rng.choice(live)
            self._world.fault("poison", name)
            self._poisoned.add(name)

    def is_poisoned(self, request_id: str) -> bool:
        return request_id in self._poisoned

    def _replay(self) -> None:
        self._replaying = self._world.now + self._length(2.0)

    def replay_after(self) -> float | None:
        """When a call that arrived just now comes a second time; None: not at all."""
        rng, world = self._world.rng, self._world
        if world.calm or world.now > self._replaying or rng.random() < 0.5:
            return None
        return rng.uniform(0.0, 2 * LEASE_S)

    def _forge(self) -> None:
        """A prefill worker announces pages of other texts or times for a while, as with a broken index."""
        worker = self._worker(Role.PREFILL)
        if worker is not None:
            self._forging[worker.name] += 1
            self._world.after(self._length(), lambda: self._forging.subtract([worker.name]))

    def maybe_forged(self, message: TransferMessage, sender: str) -> TransferMessage:
        if not isinstance(message, Announce) or not self._forging[sender] or self._world.rng.random() < 0.5:
            return message
        self._world.fault("forge", sender, f"{message.key} page {message.index}")
        if self._world.rng.random() < 0.3:
            return replace(message, page=replace(message.page, generation=message.page.generation + 1))
        return replace(message, content_key=bytes(16))


def _in_transfer(holders: frozenset[Holder]) -> bool:
    """Handed over, and nobody computes on it."""
    kinds = {holder.kind for holder in holders}
    return HolderKind.TRANSFER in kinds and HolderKind.REQUEST not in kinds


def _only_cached(holders: frozenset[Holder]) -> bool:
    return holders == {CACHE}
