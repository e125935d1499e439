"""The rebalancer, alone and with a simulated machine whose slots hold what was really put there."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.parallel.coverage import Coverage
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Copy, Placement, Topology, contiguous
from pdserve.parallel.rebalance import RebalanceConfig, Rebalancer
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
from pdserve.types import REBALANCE_OUTCOMES

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=4)
LAYERS, EXPERTS, SLOTS = 3, 8, 4
CONFIG = RebalanceConfig(spare_slots=SLOTS, at_once=2, timeout_s=10.0, rest_s=5.0)


def loads(seed: int) -> list[list[float]]:
    row = [1000 / (rank + 1) for rank in range(EXPERTS)]
    return [random.Random(seed + layer).sample(row, EXPERTS) for layer in range(LAYERS)]


def target_for(rebalancer: Rebalancer, seed: int = 1) -> Placement:
    topology = replace(TOPOLOGY, lost=rebalancer.coverage.lost)
    return plan(loads(seed), topology, SLOTS, current=rebalancer.coverage.table).table


class Machine:
    """Carries effects out on pretended memory, and checks each of them."""

    def __init__(self, table: Placement, config: RebalanceConfig = CONFIG) -> None:
        self.rebalancer, self.config = Rebalancer(table, config), config
        self.slots = {
            (layer, home.slot): expert
            for layer, experts in enumerate(table.layers)
            for expert, homes in enumerate(experts)
            for home in homes
        }
        self.routing = self.rebalancer.coverage
        self.running: list[Copy] = []
        self.spare: list[Copy] = []
        self.canary = False
        self.told: list[Told] = []
        self.wanted: list[frozenset[int]] = []
        self.now = 0.0

    def feed(self, event: Event) -> list[Effect]:
        effects = self.rebalancer.feed(event, self.now)
        for effect in effects:
            self._carry_out(effect, event)
        self.check()
        return effects

    def _carry_out(self, effect: Effect, event: Event) -> None:
        match effect:
            case StartCopy(copy=copy):
                assert copy.source is None or self._holds(copy.source, copy)
                self.running.append(copy)
            case DropCopies(copies=copies):
                for copy in copies:
                    (self.running if copy in self.running else self.spare).remove(copy)
                assert not self.running
                assert not self.spare
                self.canary = False
            case RunCanary(copies=copies):
                assert isinstance(event, StepBoundary)
                assert sorted(copies, key=str) == sorted(self.spare, key=str)
                self.canary = True
            case Install(coverage=coverage, copies=copies):
                lost = coverage.lost != self.routing.lost
                assert isinstance(event, RankLost if lost else StepBoundary)
                assert not (lost and copies)
                for copy in copies:
                    self.spare.remove(copy)
                    self.slots[copy.layer, copy.slot] = copy.expert
                self.routing = coverage
            case WantPlan(lost=lost):
                self.wanted.append(lost)
            case Told():
                self.told.append(effect)

    def _holds(self, rank: int, copy: Copy) -> bool:
        first = rank * SLOTS
        held = [self.slots.get((copy.layer, slot)) for slot in range(first, first + SLOTS)]
        return rank not in self.routing.lost and copy.expert in held

    def check(self) -> None:
        """What holds at every moment: no token goes to a slot with another expert, nor to a lost rank."""
        assert self.routing == self.rebalancer.coverage or self.told  # `done` renames the table only
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                homes = self.routing.homes(layer, expert)
                assert all(self.slots[layer, home.slot] == expert for home in homes)
                assert not {home.rank for home in homes} & self.routing.lost
                assert not homes or sum(home.share for home in homes) == pytest.approx(1)
                assert bool(homes) == ((layer, expert) not in self.routing.uncovered)
        assert bool(self.routing.missing) == bool(self.routing.uncovered)
        assert len(self.running) <= self.config.at_once
        held = [copy.rank for copy in self.running + self.spare]
        assert max(map(held.count, held), default=0) <= self.config.spare_slots

    def copy_done(self) -> None:
        copy = self.running.pop(0)
        self.spare.append(copy)
        self.feed(CopyDone(copy=copy))

    def settle(self) -> None:
        """Everything goes well from here on."""
        for _ in range(200):
            if not self.rebalancer.busy:
                return
            if self.running:
                self.copy_done()
            elif self.canary:
                self.canary = False
                self.feed(CanaryDone(same=True))
            else:
                self.feed(StepBoundary())
        raise AssertionError("the plan is not carried out")


def start() -> Machine:
    return Machine(contiguous(LAYERS, EXPERTS, TOPOLOGY, SLOTS))


def test_a_plan_comes_true_wave_by_wave_and_only_between_steps() -> None:
    machine = start()
    target = target_for(machine.rebalancer)
    copies = len(target.copies_from(machine.routing.table))
    machine.feed(PlanReady(table=target))
    assert machine.rebalancer.busy
    machine.settle()
    assert machine.rebalancer.coverage == Coverage(table=target)
    assert machine.told == [Told(outcome="done", copies=copies)]
    assert machine.feed(PlanReady(table=target)) == [Told(outcome="done")]


def test_nothing_is_installed_before_the_canary_agrees() -> None:
    machine = start()
    machine.feed(PlanReady(table=target_for(machine.rebalancer)))
    assert machine.feed(StepBoundary()) == []
    while machine.running:
        machine.copy_done()
    before = machine.routing
    assert any(isinstance(e, RunCanary) for e in machine.feed(StepBoundary()))
    assert machine.feed(StepBoundary()) == []
    assert machine.routing == before
    machine.feed(CanaryDone(same=True))
    assert machine.routing == before
    assert any(isinstance(e, Install) for e in machine.feed(StepBoundary()))


def test_a_mismatch_rolls_back_and_rests() -> None:
    machine = start()
    target = target_for(machine.rebalancer)
    machine.feed(PlanReady(table=target))
    while machine.running:
        machine.copy_done()
    before = machine.routing
    machine.feed(StepBoundary())
    machine.feed(CanaryDone(same=False))
    assert machine.routing == before
    assert [told.outcome for told in machine.told] == ["rolled_back"]
    machine.feed(PlanReady(table=target))
    assert machine.told[-1].problem == "the last plan failed a moment ago"
    machine.now += CONFIG.rest_s
    machine.feed(PlanReady(table=target))
    machine.settle()
    assert machine.rebalancer.coverage.table == target


def test_a_failed_or_late_copy_drops_the_plan() -> None:
    machine = start()
    machine.feed(PlanReady(table=target_for(machine.rebalancer)))
    machine.feed(CopyFailed(copy=machine.running[0], problem="disk"))
    assert machine.told[-1] == Told(outcome="copy_failed", problem="disk")
    machine.now += CONFIG.rest_s
    machine.feed(PlanReady(table=target_for(machine.rebalancer)))
    machine.feed(Tick())
    assert machine.rebalancer.busy
    machine.now += CONFIG.timeout_s + 1
    machine.feed(Tick())
    assert "took too long" in machine.told[-1].problem


def test_a_lost_rank_is_masked_at_once_where_replicas_exist() -> None:
    machine = Machine(plan([[1.0] * EXPERTS] * LAYERS, TOPOLOGY, SLOTS).table)
    machine.feed(RankLost(rank=1))
    assert not machine.routing.missing
    assert machine.wanted == [frozenset({1})]
    assert machine.feed(RankLost(rank=1)) == []


def test_uncovered_experts_are_named_until_they_are_back_from_disk() -> None:
    machine = start()  # one copy of each
    machine.feed(RankLost(rank=2))
    assert machine.routing.missing == "4 of layer 0, 5 of layer 0, 4 of layer 1, 5 of layer 1 and 2 more"
    target = target_for(machine.rebalancer)
    assert any(copy.source is None for copy in target.copies_from(machine.routing.table))
    machine.feed(PlanReady(table=target))
    machine.settle()
    assert not machine.routing.missing
    assert machine.told[-1].outcome == "done"


def test_a_loss_during_a_rebalance_drops_it_and_the_next_plan_knows() -> None:
    machine = start()
    stale = target_for(machine.rebalancer)
    machine.feed(PlanReady(table=stale))
    machine.copy_done()
    machine.feed(RankLost(rank=0))
    assert not machine.rebalancer.busy
    assert machine.told[-1].outcome == "rank_lost"
    machine.feed(PlanReady(table=stale))
    assert machine.told[-1].problem == "it was planned with other ranks lost"
    machine.feed(PlanReady(table=target_for(machine.rebalancer)))
    machine.settle()
    assert not machine.routing.missing


def test_the_one_list_of_outcomes_has_all_that_are_told() -> None:
    assert get_args(get_type_hints(Told)["outcome"]) == REBALANCE_OUTCOMES


def test_what_does_not_fit_is_rejected_and_after_the_last_rank_nothing_is_planned() -> None:
    machine = Machine(contiguous(LAYERS, EXPERTS, TOPOLOGY, SLOTS), replace(CONFIG, spare_slots=0))
    machine.feed(PlanReady(table=target_for(machine.rebalancer)))
    assert "spare room" in machine.told[-1].problem
    machine.feed(PlanReady(table=contiguous(LAYERS, EXPERTS, TOPOLOGY, SLOTS + 1)))
    assert "another machine" in machine.told[-1].problem
    for rank in range(4):
        machine.feed(RankLost(rank=rank))
    assert len(machine.wanted) == 3
    assert machine.routing.missing


ACTIONS = st.sampled_from(["plan", "copy", "fail", "boundary", "same", "differs", "lose", "tick"])


@settings(max_examples=120, deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.integers(0, 1000))
def test_whatever_happens_no_token_meets_a_wrong_expert_and_in_the_end_all_is_well(
    actions: list[str], seed: int
) -> None:
    machine, rng = start(), random.Random(seed)
    for number, action in enumerate(actions):
        machine.now += rng.choice([0.1, 1.0, 6.0])
        if action == "plan":
            machine.feed(PlanReady(table=target_for(machine.rebalancer, seed + number)))
        elif action == "copy" and machine.running:
            machine.copy_done()
        elif action == "fail" and machine.running:
            machine.feed(CopyFailed(copy=rng.choice(machine.running), problem="x"))
        elif action == "boundary":
            machine.feed(StepBoundary())
        elif action in ("same", "differs"):
            machine.canary = False
            machine.feed(CanaryDone(same=action == "same"))
        elif action == "lose" and len(machine.routing.lost) < 2:
            machine.feed(RankLost(rank=rng.randrange(4)))
        elif action == "tick":
            machine.feed(Tick())
    machine.settle()
    machine.now += CONFIG.rest_s
    machine.feed(Tick())
    if machine.wanted:
        assert machine.wanted[-1] == machine.routing.lost
        machine.feed(PlanReady(table=target_for(machine.rebalancer)))
        machine.settle()
    assert not machine.routing.missing
