"""Panels of experts and ranks in a real Prometheus: two ranks share experts anew, then one is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from pdserve.client import Client
from pdserve.failpoints import TESTING, VARIABLE
from pdserve.parallel.expert_files import write_snapshot
from pdserve.parallel.expert_snapshot import ExpertSnapshot
from pdserve.parallel.placement_table import Home, Placement, Topology
from pdserve.types import Role
from tests.support import tiny_models, tiny_moe
from tests.support.panels_seen import Seen
from tests.support.process_tree import rank_processes
from tests.support.prometheus import LIMIT_S, prometheus
from tests.support.stack import Stack
from tests.support.watched import Watched, metrics_url

WORKER, RANKS, EXPERTS = "aggregated-0", 2, 6
PROMPT = [7 * i % 250 for i in range(90)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Watched]:
    """One worker of two ranks that could do without one of them."""
    made = tiny_moe.mixtral()
    model = tiny_models.save(made, tmp_path / "model")
    placement = one_sided(made.config.num_hidden_layers, tmp_path / "placement.json")
    stack = Stack.start(
        {Role.AGGREGATED: 1}, environ={"": {TESTING: "1", VARIABLE: "rank_silence=set:30"}}, model=str(model),
        role=Role.AGGREGATED, num_pages=48, tp=RANKS, rank_attention="repeated", expert_placement=placement,
        rebalance_gain=0.0, metrics_port=0,
    )  # fmt: skip
    with ExitStack() as over:
        over.callback(stack.stop)
        (tmp_path / "prometheus").mkdir()
        scraped = prometheus(tmp_path / "prometheus", f"{metrics_url(stack)}/targets")
        yield Watched(stack, over.enter_context(scraped), tmp_path, "")


def one_sided(num_layers: int, path: Path) -> str:
    """A placement of all experts on both ranks, where one does most of the work."""
    layer = tuple(
        (Home(rank=0, slot=expert, share=0.9), Home(rank=1, slot=EXPERTS + expert, share=0.1))
        for expert in range(EXPERTS)
    )
    topology = Topology(num_nodes=1, ranks_per_node=RANKS)
    table = Placement(topology=topology, slots_per_rank=EXPERTS, layers=(layer,) * num_layers)
    loads = ((1.0,) * EXPERTS,) * num_layers
    snapshot = ExpertSnapshot(name="", layers=tuple(range(num_layers)), loads=loads, table=table)
    write_snapshot(snapshot, path, "test")
    return str(path)


def answered(client: Client) -> list[int]:
    stream = client.generate(
        token_ids=PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True, deadline_s=LIMIT_S
    )
    return list(stream.result().token_ids)


def shared_anew(client: Client) -> list[list[int]]:
    """What is answered while experts are shared anew; returns once that is done."""
    (asked,) = client.rebalance_experts()
    assert asked.started, asked
    answers, end = [answered(client)], time.monotonic() + LIMIT_S
    while (report := client.get_experts()[0]).rebalancing:
        answers.append(answered(client))
        assert time.monotonic() < end, report
    assert report.last_rebalance == "done"
    return answers


def test_panels_of_experts_and_ranks(fleet: Watched) -> None:
    seen = Seen(fleet)

    def imbalance() -> dict[str, float]:
        (worker,) = fleet.stack.status().workers
        assert worker.load.expert_imbalance >= 1
        return {"aggregated": worker.load.expert_imbalance}

    with fleet.stack.client() as client:
        right = answered(client)
        seen.shows("workers/Placements of experts", {"aggregated done": 0, "prefill done": 0})
        seen.shows("workers/Lost ranks", {"aggregated": 0})
        assert set(map(tuple, shared_anew(client))) == {tuple(right)}
        seen.shows("workers/Placements of experts", {"aggregated done": 1, "aggregated rank_lost": 0})
        seen.agrees("workers/Imbalance of experts", imbalance)
        rank_of(fleet.stack).kill()
        assert answered(client) == right
        seen.shows("workers/Lost ranks", {"aggregated": 1, "decode": 0})


def rank_of(stack: Stack) -> psutil.Process:
    """The process of the worker's other rank."""
    (found,) = rank_processes(stack.workers[WORKER].pid)
    return found
