"""When a worker moves its experts: asked, or by its loads; never two plans at once; not for nothing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.parallel.expert_snapshot import ExpertSnapshot
from pdserve.parallel.placement_table import Copy, Placement, Topology, contiguous
from pdserve.parallel.plan_process import Proposal, propose, propose_elsewhere
from pdserve.ranks.rebalancing import RebalanceStatus
from pdserve.worker.expert_keeper import LEAST_TOKENS, ExpertKeeper
from pdserve.worker.experts import ExpertWatch

TABLE = contiguous(2, 4, Topology(num_nodes=1, ranks_per_node=2), 3)
SKEWED = torch.tensor([[900, 900, 10, 10], [800, 700, 20, 10]])


class Ranks:
    """What carries plans out: two steps each."""

    def __init__(self) -> None:
        self.status = RebalanceStatus(table=TABLE)
        self.wanted: Placement | None = None
        self.steps = 0

    @property
    def busy(self) -> bool:
        return self.wanted is not None

    def offer(self, table: Placement, copies: tuple[Copy, ...] | None = None) -> None:
        assert copies == table.copies_from(TABLE)
        self.wanted, self.steps = table, 0

    async def step(self) -> None:
        self.steps += 1
        if self.steps == 2 and self.wanted is not None:
            self.status = replace(self.status, table=self.wanted)
            self.wanted = None


class Watch(ExpertWatch):
    """Says when it is told of a table."""

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__("w", counts, [0, 1], 2, TABLE)
        self.news = asyncio.Event()

    def moved(self, table: Placement) -> None:
        super().moved(table)
        self.news.set()


def loaded(times: float = 1.0) -> Watch:
    counts = torch.zeros(2, 4, dtype=torch.int64)
    watch = Watch(counts)
    counts += (SKEWED * times).long()
    return watch


def keeper(watch: ExpertWatch, ranks: Ranks | None, least_gain: float = 0.0) -> ExpertKeeper:
    step = Ranks().step if ranks is None else ranks.step
    return ExpertKeeper("w", watch, ranks, step, least_gain=least_gain, propose=propose)


async def test_asked_it_moves_experts_and_tells_of_the_new_table() -> None:
    ranks, watch = Ranks(), loaded()
    before = watch.imbalance(1.0)
    kept = keeper(watch, ranks)
    kept.start()
    answer = await kept.rebalance(1.0)
    assert answer.started
    assert answer.copies > 0
    assert answer.gain > 0.3
    assert (await kept.rebalance(1.0)).reason == "a rebalance is under way"
    async with asyncio.timeout(20):
        await watch.news.wait()
    assert watch.snapshot(1.0).table == ranks.status.table
    assert watch.imbalance(1.0) < before
    assert (await kept.rebalance(1.0)).reason == "there is nothing to gain"
    await kept.stop()


async def test_experts_that_can_not_move_stay() -> None:
    assert "one rank" in (await keeper(loaded(), None).rebalance(1.0)).reason


async def test_it_acts_by_itself_from_a_gain_on_and_not_on_few_tokens() -> None:
    for times, least_gain, acts in (
        (100.0, 0.1, True),
        (100.0, 0.9, False),
        (100.0, 0.0, False),
        (1.0, 0.1, False),
    ):
        watch, ranks = loaded(times), Ranks()
        assert (watch.mean_tokens(1.0) >= LEAST_TOKENS) == (times > 1)
        await keeper(watch, ranks, least_gain)._look(1.0)
        assert ranks.busy == acts


async def test_a_plan_that_fails_is_no_end() -> None:
    def fails(snapshot: ExpertSnapshot) -> Proposal:
        raise InternalError("no")

    ranks = Ranks()
    kept = ExpertKeeper("w", loaded(100.0), ranks, ranks.step, least_gain=0.1, propose=fails)
    await kept._look(1.0)
    with pytest.raises(InternalError):
        await kept.rebalance(1.0)
    assert not kept.busy


async def test_whoever_asks_and_goes_away_leaves_one_planner() -> None:
    """Its plan comes to nothing, and there is no second one beside it."""
    begun, end = threading.Event(), threading.Event()

    def slow(snapshot: ExpertSnapshot) -> Proposal:
        begun.set()
        assert end.wait(20)
        return propose(snapshot)

    ranks = Ranks()
    kept = ExpertKeeper("w", loaded(), ranks, ranks.step, least_gain=0.0, propose=slow)
    asked = asyncio.create_task(kept.rebalance(1.0))
    await asyncio.to_thread(begun.wait, 20)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert (await kept.rebalance(1.0)).reason == "a rebalance is under way"
    end.set()
    async with asyncio.timeout(20):
        while kept.busy:
            await asyncio.to_thread(end.wait)
    assert not ranks.busy
    assert (await kept.rebalance(1.0)).started


def test_a_process_of_its_own_plans_the_same() -> None:
    snapshot = loaded().snapshot(1.0)
    assert propose_elsewhere(snapshot) == propose(snapshot)
