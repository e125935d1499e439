"""The rebalancer over real layers: outputs keep their bits through copies, canary, swaps and roll-backs.

Ranks are ranges of slots in one process here; weights really lie in slots and are really copied.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from pdserve.kernels.grouped_linear import PackedGroups
from pdserve.layers.moe import ExpertMap, LocalExperts
from pdserve.layers.replicas import ReplicaMap
from pdserve.parallel.coverage import Coverage
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Copy, Home, Placement, Topology, contiguous
from pdserve.parallel.rebalance import RebalanceConfig, Rebalancer
from pdserve.parallel.rebalance_events import (
    CanaryDone,
    CopyDone,
    DropCopies,
    Event,
    Install,
    PlanReady,
    RankLost,
    RunCanary,
    StartCopy,
    StepBoundary,
    Told,
)

LAYERS, EXPERTS, RANKS, SLOTS, WIDTH, INNER = 3, 6, 3, 3, 16, 24
TOPOLOGY = Topology(num_nodes=1, ranks_per_node=RANKS)
Weights = tuple[torch.Tensor, torch.Tensor]


def weights_of(layer: int, expert: int) -> Weights:
    seed = torch.Generator().manual_seed(100 * layer + expert)
    return torch.randn(2 * INNER, WIDTH, generator=seed), torch.randn(WIDTH, INNER, generator=seed)


def runner(slots: list[Weights], to_slots: ExpertMap) -> LocalExperts:
    up, down = (torch.stack([pair[side] for pair in slots]) for side in (0, 1))
    return LocalExperts(gate_up=PackedGroups.pack(up), down=PackedGroups.pack(down), map=to_slots)


def output(experts: LocalExperts, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> torch.Tensor:
    done = experts(x_TE, experts_TC)
    return done.rows_ME[done.row_of_TC]


@dataclass
class Host:
    """Slots with weights, and the rebalancer's driver. spoil: bring other weights than those asked for."""

    table: Placement
    spoil: bool = False
    told: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rebalancer = Rebalancer(self.table, RebalanceConfig(spare_slots=SLOTS))
        nothing = (torch.zeros(2 * INNER, WIDTH), torch.zeros(WIDTH, INNER))
        self.slots = [[nothing] * self.table.num_slots for _ in range(LAYERS)]
        for layer, experts in enumerate(self.table.layers):
            for expert, homes in enumerate(experts):
                for home in homes:
                    self.slots[layer][home.slot] = weights_of(layer, expert)
        self.spare: dict[Copy, Weights] = {}
        self.begun: list[Copy] = []
        self.canary: RunCanary | None = None
        self.coverage = self.rebalancer.coverage

    def layers(self, coverage: Coverage, copies: tuple[Copy, ...] = ()) -> list[LocalExperts]:
        """The experts of every layer under a table, with these copies in their slots."""
        slots = [list(layer) for layer in self.slots]
        for copy in copies:
            slots[copy.layer][copy.slot] = self.spare[copy]
        return [
            runner(
                slots[layer],
                ReplicaMap(
                    [[(h.slot, h.share) for h in coverage.homes(layer, e)] for e in range(EXPERTS)],
                    coverage.table.num_slots,
                ),
            )
            for layer in range(LAYERS)
        ]

    def feed(self, event: Event) -> None:
        for effect in self.rebalancer.feed(event, now=0.0):
            match effect:
                case StartCopy(copy=copy):
                    self.begun.append(copy)
                case DropCopies(copies=copies):
                    self.begun, self.canary = [], None
                    self.spare = {c: w for c, w in self.spare.items() if c not in copies}
                case RunCanary():
                    self.canary = effect
                case Install(coverage=coverage, copies=copies):
                    for copy in copies:
                        self.slots[copy.layer][copy.slot] = self.spare.pop(copy)
                    self.coverage = coverage
                case Told():
                    self.told.append(effect)

    def step(self, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> list[torch.Tensor]:
        """One step of all layers; a copy ends meanwhile, and the canary runs if there is one."""
        self.feed(StepBoundary())
        outs = [output(layer, x_TE, experts_TC) for layer in self.layers(self.coverage)]
        if self.canary is not None:
            canary, self.canary = self.canary, None
            trial = self.layers(Coverage(table=canary.table, lost=self.coverage.lost), canary.copies)
            same = all(torch.equal(output(trial[n], x_TE, experts_TC), outs[n]) for n in canary.layers)
            self.feed(CanaryDone(same=same))
        for copy in self.begun[:2]:
            self.begun.remove(copy)
            assert copy.source is not None
            first = copy.source * SLOTS
            held = self.coverage.table.occupants(copy.layer)
            source = next(slot for slot in range(first, first + SLOTS) if held[slot] == copy.expert)
            other = weights_of(copy.layer, (copy.expert + 1) % EXPERTS)
            self.spare[copy] = other if self.spoil else self.slots[copy.layer][source]
            self.feed(CopyDone(copy=copy))
        return outs


def skewed(seed: int) -> list[list[float]]:
    row = [100.0 / (rank + 1) ** 1.2 for rank in range(EXPERTS)]
    return [random.Random(seed + layer).sample(row, EXPERTS) for layer in range(LAYERS)]


def target_of(host: Host, seed: int) -> Placement:
    return plan(skewed(seed), TOPOLOGY, SLOTS, current=host.coverage.table).table


@pytest.fixture(scope="module")
def alone() -> list[LocalExperts]:
    """One copy of each expert, in order."""
    every = range(EXPERTS)
    return [runner([weights_of(n, e) for e in every], ExpertMap.identity(EXPERTS)) for n in range(LAYERS)]


def check_step(host: Host, alone: list[LocalExperts], seed: int) -> None:
    random_rows = torch.Generator().manual_seed(seed)
    x_TE = torch.randn(20, WIDTH, generator=random_rows)
    experts_TC = torch.rand(20, EXPERTS, generator=random_rows).argsort(-1)[:, :2]
    for mine, wanted in zip(host.step(x_TE, experts_TC), alone, strict=True):
        assert torch.equal(mine, output(wanted, x_TE, experts_TC))


def test_outputs_keep_their_bits_in_every_step_of_two_rebalances(alone: list[LocalExperts]) -> None:
    host = Host(contiguous(LAYERS, EXPERTS, TOPOLOGY, SLOTS))
    for seed in (1, 7):
        target = target_of(host, seed)
        assert target.copies_from(host.coverage.table)
        host.feed(PlanReady(table=target))
        steps = 0
        while host.rebalancer.busy:
            check_step(host, alone, steps)
            steps += 1
        assert host.rebalancer.coverage.table == target
        check_step(host, alone, 99)
    assert [told.outcome for told in host.told] == ["done", "done"]


def test_wrong_weights_are_caught_by_the_canary_before_they_serve(alone: list[LocalExperts]) -> None:
    host = Host(contiguous(LAYERS, EXPERTS, TOPOLOGY, SLOTS), spoil=True)
    host.feed(PlanReady(table=target_of(host, 1)))
    for seed in range(20):
        check_step(host, alone, seed)
    assert [told.outcome for told in host.told] == ["rolled_back"]
    assert host.coverage.table == contiguous(LAYERS, EXPERTS, TOPOLOGY, SLOTS)
    assert not host.spare


def test_a_lost_rank_is_passed_by_without_a_change_of_bits(alone: list[LocalExperts]) -> None:
    slots = [[0, 3], [1, 4], [2, 6], [5], [7], [8]]  # by expert; all that rank 0 holds is elsewhere too
    homes = tuple(tuple(Home(rank=s // SLOTS, slot=s, share=1 / len(own)) for s in own) for own in slots)
    host = Host(Placement(topology=TOPOLOGY, slots_per_rank=SLOTS, layers=(homes,) * LAYERS))
    host.feed(RankLost(rank=0))
    assert not host.coverage.missing
    for layer in host.slots:
        layer[:SLOTS] = [weights_of(9, 9)] * SLOTS  # whatever lies there now
    check_step(host, alone, 3)
