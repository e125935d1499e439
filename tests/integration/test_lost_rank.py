"""A replica goes on without a rank whose experts have replicas, with the same tokens; else it is over.

Three real ranks that divide experts alone, the leader in this process; the oracle is one device's runner.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, WorkerLost
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.parallel.expert_files import write_snapshot
from pdserve.parallel.expert_snapshot import ExpertSnapshot
from pdserve.parallel.placement_table import Home, Placement, Topology
from pdserve.ranks import beats
from pdserve.ranks.children import launch_child
from pdserve.ranks.frames import Kind, send
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.replica import Replica
from pdserve.ranks.runner import ParallelRunner
from pdserve.ranks.tender import encode
from pdserve.types import Role
from tests.support import tiny_models, tiny_moe
from tests.support.parallel_script import NUM_PAGES, PAGE, run_script, script, script_runner
from tests.support.process_tree import rank_processes

RANKS, SLOTS, EXPERTS = 3, 4, 6
Model = tuple[str, LoadedModel]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that a test overloads is no death: silence counts later, here and in the ranks."""
    monkeypatch.setattr(beats, "SILENT_S", 4.0)
    monkeypatch.setenv("PDSERVE_TESTING", "1")
    monkeypatch.setenv("PDSERVE_FAILPOINTS", "rank_silence=set:30")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = str(tiny_models.save(tiny_moe.mixtral(), tmp_path_factory.mktemp("mixtral")))
    return path, load_model(path, "float32")


def everywhere_twice(num_layers: int, path: Path) -> str:
    """A placement where each expert is on two of three ranks."""
    taken = [0] * RANKS
    layer = []
    for expert in range(EXPERTS):
        homes = []
        for rank in sorted({expert % RANKS, (expert + 1) % RANKS}):
            homes.append(Home(rank=rank, slot=rank * SLOTS + taken[rank], share=0.5))
            taken[rank] += 1
        layer.append(tuple(homes))
    topology = Topology(num_nodes=1, ranks_per_node=RANKS)
    table = Placement(topology=topology, slots_per_rank=SLOTS, layers=(tuple(layer),) * num_layers)
    loads = ((1.0,) * EXPERTS,) * num_layers
    write_snapshot(
        ExpertSnapshot(name="", layers=tuple(range(num_layers)), loads=loads, table=table), path, "x"
    )
    return str(path)


@contextmanager
def serving(
    model: Model, run_dir: Path, placement: str = ""
) -> Iterator[tuple[ParallelRunner, list[psutil.Process], queue.Queue[str]]]:
    config = WorkerConfig(
        worker_id="aggregated-0", role=Role.AGGREGATED, model=model[0], dtype="float32", deterministic=True,
        page_size=PAGE, num_pages=NUM_PAGES, tp=RANKS, rank_attention="repeated", expert_placement=placement,
    )  # fmt: skip
    lost: queue.Queue[str] = queue.Queue()
    replica = Replica.launch(config, str(run_dir), launch_child, lost.put)
    try:
        runner, pool = replica.start(model[1], pool_id=7)
        replica.serve()
        ranks = rank_processes(os.getpid())
        yield runner, ranks, lost
    finally:
        replica.close()
        pool.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_it_goes_on_with_the_same_tokens_where_experts_have_replicas(
    model: Model, tmp_path: Path, end: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = run_script(script_runner(model[1], deterministic=True))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    placement = everywhere_twice(model[1].config.num_layers, tmp_path / "placement.json")
    with serving(model, run_dir, placement) as (runner, ranks, lost):
        found = []
        for number, plan in enumerate(script(runner.config.vocab_size)):
            if (
                number == 3
            ):  # in the midst of two sequences; the next step meets the gap, or loses it on its way
                ranks[0].send_signal(end)
            found.append(runner.execute(plan).tokens)
        assert found == expected
        assert runner.rebalancing is not None
        assert runner.rebalancing.status.lost == runner.lost
        assert len(runner.lost) == 1
        assert not runner.rebalancing.busy
        ranks[0].wait(10)  # a stopped one too
        assert run(runner) == expected
        assert lost.empty()
        ranks[1].kill()  # now experts have no home left
        assert "ended" in lost.get(timeout=10)
        assert "nobody else has expert 1 of layer 0" in caplog.text
        with pytest.raises(WorkerLost):
            runner.execute(next(script(runner.config.vocab_size)))


def run(runner: ParallelRunner) -> list[object]:
    """All of the script; the tokens of its steps."""
    return [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)]


def test_whoever_waits_is_told_if_it_can_not_go_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table may have come meanwhile that needs the rank."""

    def needed(rank: int) -> None:
        raise WorkerLost("experts without a home")

    placement = everywhere_twice(model[1].config.num_layers, tmp_path / "placement.json")
    with serving(model, tmp_path, placement) as (runner, ranks, lost):
        monkeypatch.setattr(runner.rebalancing, "lose", needed)
        ranks[0].kill()
        with pytest.raises(WorkerLost):
            run(runner)
        assert "a step failed" in lost.get(timeout=10)


def test_an_idle_worker_knows_at_once_and_goes_on_with_its_next_step(model: Model, tmp_path: Path) -> None:
    expected, _ = run_script(script_runner(model[1], deterministic=True))
    placement = everywhere_twice(model[1].config.num_layers, tmp_path / "placement.json")
    with serving(model, tmp_path, placement) as (runner, ranks, lost):
        assert not runner.lost
        ranks[0].kill()
        end = time.monotonic() + 60
        while not runner.lost:
            assert time.monotonic() < end
        assert runner.rebalancing is not None
        assert not runner.rebalancing.status.lost, "no step yet"
        assert run(runner) == expected
        assert runner.rebalancing.status.lost == runner.lost
        assert lost.empty()


def test_what_ranks_said_before_another_was_lost_counts() -> None:
    """They say it once; unheard, a copy would be under way for ever."""
    word = {"word": "given", "copy": 1, "sum": 5}
    pairs = [socket.socketpair() for _ in range(2)]
    runner = ParallelRunner.__new__(ParallelRunner)
    runner._ranks = tuple(ours for ours, _ in pairs)
    heard: list[object] = []
    runner.rebalancing = cast(Rebalancing, SimpleNamespace(hear=heard.extend))
    serial = (7).to_bytes(8, "little")
    send(pairs[0][1], Kind.DONE, serial + encode([word]))
    pairs[1][1].close()
    with pytest.raises(WorkerLost):
        runner._all_done(serial)
    assert heard == [word]
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_without_replicas_it_is_over(model: Model, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (runner, ranks, lost):
        ranks[0].kill()
        assert "ended" in lost.get(timeout=10)
        with pytest.raises(WorkerLost):
            runner.execute(next(script(runner.config.vocab_size)))


def test_only_experts_can_be_divided_so(model: Model, tmp_path: Path) -> None:
    config = WorkerConfig(worker_id="a", role=Role.AGGREGATED, model="m", tp=2, rank_attention="repeated")
    with pytest.raises(ConfigError, match="rank_attention"):
        dataclasses.replace(config, rank_exchange="gloo")
