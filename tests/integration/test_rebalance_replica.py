"""Rebalances in a replica of real ranks, the leader in this process: bits stay, errors roll back.

The oracle is the single-device runner over the same steps.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.config.worker import WorkerConfig
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Placement
from pdserve.ranks import beats
from pdserve.ranks.children import launch_child
from pdserve.ranks.ferry import Ferryman, Job
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.replica import Replica
from pdserve.ranks.runner import ParallelRunner
from pdserve.types import Role
from tests.support import tiny_models, tiny_moe
from tests.support.parallel_script import NUM_PAGES, PAGE, run_script, script, script_runner

COPY = Ferryman._copy
LIMIT = 20_000
"""Steps after which a rebalance is not coming to an end."""


Model = tuple[str, LoadedModel]


def loaded(made: Any, folder: Path) -> Model:
    path = str(tiny_models.save(made, folder))
    return path, load_model(path, "float32")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that a test overloads is no death: silence counts later, here and in the ranks."""
    monkeypatch.setattr(beats, "SILENT_S", 4.0)
    monkeypatch.setenv("PDSERVE_TESTING", "1")
    monkeypatch.setenv("PDSERVE_FAILPOINTS", "rank_silence=set:30")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded(tiny_moe.mixtral(), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded(tiny_moe.deepseek_v3(), tmp_path_factory.mktemp("deepseek"))


@contextmanager
def serving(folder: str, model: LoadedModel, run_dir: Path, tp: int = 2) -> Iterator[ParallelRunner]:
    config = WorkerConfig(
        worker_id="aggregated-0", role=Role.AGGREGATED, model=folder, dtype="float32", deterministic=True,
        page_size=PAGE, num_pages=NUM_PAGES, tp=tp, expert_slots=5,
    )  # fmt: skip
    replica = Replica.launch(config, str(run_dir), launch_child, pytest.fail)
    try:
        runner, pool = replica.start(model, pool_id=7)
        replica.serve()
        yield runner
    finally:
        replica.close()
        pool.close()


def rebalancing_of(runner: ParallelRunner) -> Rebalancing:
    assert runner.rebalancing is not None
    return runner.rebalancing


def target(table: Placement, seed: int) -> Placement:
    row = [100.0 / (rank + 1) ** 1.2 for rank in range(table.num_experts)]
    loads = [random.Random(seed + layer).sample(row, len(row)) for layer in range(table.num_layers)]
    found = plan(loads, table.topology, table.slots_per_rank, current=table).table
    assert found.copies_from(table)
    return found


def idle_until_done(runner: ParallelRunner) -> None:
    steps = 0
    while rebalancing_of(runner).busy:
        runner.idle_step()
        steps += 1
        assert steps < LIMIT


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_bits_stay_while_experts_move_under_steps(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: Model = request.getfixturevalue(name)
    expected, _ = run_script(script_runner(model[1], deterministic=True))
    with serving(*model, tmp_path) as runner:
        rebalancing = rebalancing_of(runner)
        for seed in (1, 7):
            wanted = target(rebalancing.status.table, seed)
            rebalancing.offer(wanted)
            rounds = 0
            while rebalancing.busy:
                assert [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)] == expected
                rounds += 1
                assert rounds < LIMIT
            assert rebalancing.status.table == wanted
            assert [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)] == expected
        status = rebalancing.status
        assert status.outcomes == {"done": 2}
        assert status.copied_bytes > 0
        assert rebalancing.version > 1


def test_an_idle_replica_rebalances_and_its_bits_stay(mixtral: Model, tmp_path: Path) -> None:
    """Three ranks; without requests steps are empty, and canaries compute rows of their own."""
    expected, _ = run_script(script_runner(mixtral[1], deterministic=True))
    with serving(*mixtral, tmp_path, tp=3) as runner:
        wanted = target(rebalancing_of(runner).status.table, 3)
        rebalancing_of(runner).offer(wanted)
        idle_until_done(runner)
        assert rebalancing_of(runner).status.table == wanted
        assert [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)] == expected


def spoiled(ferryman: Ferryman, job: Job) -> int | None:
    """The checksum says that all is well, and the block's first weights are others."""
    checksum = COPY(ferryman, job)
    if not job.out:
        ctypes.memset(job.pieces[0][0], 0x3F, job.pieces[0][1])
    return checksum


def damaged(ferryman: Ferryman, job: Job) -> int | None:
    """Something else came in than went out."""
    checksum = COPY(ferryman, job)
    return checksum if job.out or checksum is None else checksum ^ 1


def spilt(ferryman: Ferryman, job: Job) -> int | None:
    """What went out is not what the source has."""
    checksum = COPY(ferryman, job)
    if job.out:
        ctypes.memset(job.lane, 0x3F, 1)
    return checksum


@pytest.mark.parametrize(
    ("copy", "outcome", "idle"), [(spoiled, "rolled_back", True), (spoiled, "rolled_back", False),
                                  (damaged, "copy_failed", False), (spilt, "copy_failed", False)],
)  # fmt: skip
def test_weights_that_are_not_what_they_should_be_never_serve(
    mixtral: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: Any, outcome: str, idle: bool
) -> None:
    """Rank 0's thread is ours to spoil. What was installed before stays; what is tried never serves."""
    expected, _ = run_script(script_runner(mixtral[1], deterministic=True))
    monkeypatch.setattr(Ferryman, "_copy", copy)
    with serving(*mixtral, tmp_path) as runner:
        rebalancing = rebalancing_of(runner)
        wanted = target(rebalancing.status.table, 1)
        copies = wanted.copies_from(rebalancing.status.table)
        assert any(c.rank == 0 for c in copies)
        assert any(c.source == 0 for c in copies)
        rebalancing.offer(wanted)
        if idle:
            idle_until_done(runner)
        rounds = 0
        while rebalancing.busy:
            assert [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)] == expected
            rounds += 1
            assert rounds < LIMIT
        assert rebalancing.status.outcomes == {outcome: 1}
        assert rebalancing.status.table != wanted
        rebalancing.offer(wanted)  # too soon after the last one
        idle_until_done(runner)
        assert rebalancing.status.outcomes == {outcome: 1, "rejected": 1}
        assert [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)] == expected
