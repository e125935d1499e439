"""From one expert placement to another without a pause, and through the loss of ranks. Pure: events and clock
come in, effects go out; the same events give the same effects.

A plan is carried out in *waves* of layers. The weights that a wave needs are copied in the background into
spare room beside the slots; then one step runs the wave's layers with the new table as well, on the same rows
(the canary), and only if the results agree is the table installed, between two steps. Until then the old
table serves and its slots are untouched, so rolling back is dropping copies. What does not live here:
copying, comparing, planning (`placement`).

    idle ─ PlanReady ─▶ copying ─ all CopyDone ─▶ trying ─ StepBoundary ─▶ judging ─ CanaryDone ─▶ ready
      ▲                    │ CopyFailed, late                                │ differs, late          │
      ├────────────────────┴──────────────── RankLost ───────────────────────┘         StepBoundary ──┤
      └──────────────────────────────────────────────────────────────── no wave is left ──────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pdserve.parallel.coverage import Coverage
from pdserve.parallel.placement_table import Copy, Placement
from pdserve.parallel.rebalance_events import (
    CanaryDone,
    CopyDone,
    CopyFailed,
    DropCopies,
    Effect,
    Event,
    Install,
    PlanReady,
    RankLost,
    RunCanary,
    StartCopy,
    StepBoundary,
    Tick,
    Told,
    WantPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig:
    """spare_slots: room for copies on each rank beside its slots. As many as the slots of one layer are
    enough for any plan; a plan with a layer that needs more than there are is rejected.

    at_once: copies that run at the same time at most. timeout_s: of a wave's copies, and of its canary.
    rest_s: after a roll-back or a failed copy no plan is taken for so long. layers: of a wave at most; a
    canary computes them twice.
    """

    spare_slots: int
    layers: int = 1 << 30
    at_once: int = 4
    timeout_s: float = 60.0
    rest_s: float = 30.0


Phase = Literal["copying", "trying", "judging", "ready"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Layers on their way. table: the present one with these layers of the target. since: seconds."""

    phase: Phase
    layers: tuple[int, ...]
    table: Placement
    copies: tuple[Copy, ...]
    waiting: tuple[Copy, ...]
    running: frozenset[Copy]
    since: float


class Rebalancer:
    """Feed it events in order; carry out its effects in order. It belongs to one thread."""

    def __init__(self, table: Placement, config: RebalanceConfig) -> None:
        self.coverage = Coverage(table=table, lost=table.topology.lost)
        self._config = config
        self._target: Placement | None = None
        self._copies: dict[int, tuple[Copy, ...]] = {}
        self._wave: Wave | None = None
        self._installed = 0
        self._rests_until = float("-inf")
        self._short = False  # a rank was lost, and no plan without it has been carried out
        self._asked = False

    @property
    def busy(self) -> bool:
        """A plan is under way."""
        return self._target is not None

    def feed(self, event: Event, now: float) -> list[Effect]:
        """What is to be done now. now: monotonic seconds. Events that came too late change nothing."""
        match event:
            case PlanReady():
                return self._plan(event, now)
            case RankLost():
                return self._lost(event.rank)
            case Tick():
                return self._tick(now)
            case _ if self._wave is None:
                return []
            case CopyDone():
                return self._copied(self._wave, event.copy)
            case CopyFailed():
                if event.copy not in self._wave.running:
                    return []
                return self._give_up("copy_failed", event.problem, now)
            case StepBoundary():
                return self._boundary(self._wave, now)
            case CanaryDone():
                return self._judged(self._wave, event.same, now)

    # -- plans and waves -----------------------------------------------------------------------------------

    def _plan(self, ready: PlanReady, now: float) -> list[Effect]:
        self._asked, table = False, ready.table
        if problem := self._problem(table, now):
            return [Told(outcome="rejected", problem=problem)]
        by_layer: dict[int, list[Copy]] = {}
        found = table.copies_from(self.coverage.table) if ready.copies is None else ready.copies
        for copy in found:
            by_layer.setdefault(copy.layer, []).append(copy)
        for layer, copies in by_layer.items():
            if _most(copies) > self._config.spare_slots:
                problem = f"layer {layer} needs more copies on a rank than there is spare room"
                return [Told(outcome="rejected", problem=problem)]
        self._target, self._installed = table, 0
        self._copies = {layer: tuple(copies) for layer, copies in by_layer.items()}
        return self._next(now)

    def _problem(self, table: Placement, now: float) -> str:
        here = self.coverage.table
        if self._target is not None:
            return "another plan is under way"
        if now < self._rests_until:
            return "the last plan failed a moment ago"
        shapes = {(t.topology.num_nodes, t.topology.ranks_per_node, t.slots_per_rank) for t in (table, here)}
        if len(shapes) > 1 or (table.num_layers, table.num_experts) != (here.num_layers, here.num_experts):
            return "it is for another machine or model"
        if table.topology.lost != self.coverage.lost:
            return "it was planned with other ranks lost"
        return ""

    def _next(self, now: float) -> list[Effect]:
        """Starts the next wave: layers that differ, in order, as many as spare room allows."""
        assert self._target is not None
        here, target = self.coverage.table, self._target
        layers, copies = self._choose(here, target)
        if not layers:
            return self._finished()
        self._wave = Wave(
            phase="copying", layers=tuple(layers), table=here.mixed(target, layers), copies=tuple(copies),
            waiting=tuple(copies), running=frozenset(), since=now,
        )  # fmt: skip
        return self._start_copies(self._wave)

    def _choose(self, here: Placement, target: Placement) -> tuple[list[int], list[Copy]]:
        layers: list[int] = []
        copies: list[Copy] = []
        for layer in range(target.num_layers):
            if target.layers[layer] == here.layers[layer]:
                continue
            more = [*copies, *self._copies.get(layer, ())]
            full = len(layers) == self._config.layers or _most(more) > self._config.spare_slots
            if layers and full:
                break
            layers.append(layer)
            copies = more
        return layers, copies

    def _finished(self) -> list[Effect]:
        assert self._target is not None
        self.coverage = replace(self.coverage, table=self._target)  # the same homes; fewer ranks may hold any
        self._target, self._short = None, False
        return [Told(outcome="done", copies=self._installed)]

    def _start_copies(self, wave: Wave) -> list[Effect]:
        free = self._config.at_once - len(wave.running)
        started, waiting = wave.waiting[:free], wave.waiting[free:]
        running = wave.running | set(started)
        phase: Phase = "copying" if running else "trying"
        self._wave = replace(wave, phase=phase, waiting=waiting, running=running)
        return [StartCopy(copy=copy) for copy in started]

    def _copied(self, wave: Wave, copy: Copy) -> list[Effect]:
        if copy not in wave.running:
            return []
        return self._start_copies(replace(wave, running=wave.running - {copy}))

    def _boundary(self, wave: Wave, now: float) -> list[Effect]:
        if wave.phase == "ready":
            return self._install(wave, now)
        if wave.phase != "trying":
            return []
        if any(layer in wave.layers for layer, _ in self.coverage.uncovered):
            return self._install(wave, now)  # there is nothing to compare with; digests of copies must do
        self._wave = replace(wave, phase="judging", since=now)
        return [RunCanary(table=wave.table, layers=wave.layers, copies=wave.copies)]

    def _judged(self, wave: Wave, same: bool, now: float) -> list[Effect]:
        if wave.phase != "judging":
            return []
        if not same:
            return self._give_up("rolled_back", "the canary step gave other results", now)
        self._wave = replace(wave, phase="ready")
        return []

    def _install(self, wave: Wave, now: float) -> list[Effect]:
        self.coverage = replace(self.coverage, table=wave.table)
        self._installed += len(wave.copies)
        self._wave = None
        return [Install(coverage=self.coverage, copies=wave.copies), *self._next(now)]

    # -- what goes wrong -----------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Effect]:
        wave = self._wave
        if wave is not None and wave.phase in ("copying", "judging"):
            if now - wave.since > self._config.timeout_s:
                return self._give_up("copy_failed", f"{wave.phase} took too long", now)
        elif self._target is None and self._short and not self._asked and now >= self._rests_until:
            return self._want()
        return []

    def _give_up(
        self, outcome: Literal["rolled_back", "copy_failed"], problem: str, now: float
    ) -> list[Effect]:
        """The plan is dropped; waves that are installed stay, each of them is whole."""
        self._rests_until = now + self._config.rest_s
        return [*self._drop(), Told(outcome=outcome, problem=problem, copies=self._installed)]

    def _drop(self) -> list[Effect]:
        wave, self._wave, self._target = self._wave, None, None
        if wave is None:
            return []
        begun = tuple(copy for copy in wave.copies if copy not in wave.waiting)
        return [DropCopies(copies=begun)] if begun else []

    def _lost(self, rank: int) -> list[Effect]:
        """Routes past the rank at once and asks for a plan without it. Coverage says what nobody has."""
        topology = self.coverage.table.topology
        if rank in self.coverage.lost or not 0 <= rank < topology.num_ranks:
            return []
        effects: list[Effect] = []
        if self._target is not None:
            effects = [*self._drop(), Told(outcome="rank_lost", copies=self._installed)]
        self.coverage, self._short = self.coverage.without(rank), True
        return [*effects, Install(coverage=self.coverage, copies=()), *self._want()]

    def _want(self) -> list[Effect]:
        lost = self.coverage.lost
        if len(lost) == self.coverage.table.topology.num_ranks:
            return []
        self._asked = True
        return [WantPlan(lost=lost)]


def _most(copies: Iterable[Copy]) -> int:
    """Copies that one rank gets at most."""
    return max(Counter(copy.rank for copy in copies).values(), default=0)
