"""A replica whose ranks have sequences of their own, the leader in this process: real scheduler, real ranks.

The oracle is one device's engine with room for everything. The pools here are so small that sequences lose
their pages and are computed again, on whichever rank has room.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pdserve.config.serve import ServeConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, WorkerLost
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.parallel.placement import plan
from pdserve.ranks import beats
from pdserve.ranks.children import launch_child
from pdserve.ranks.pools import pool_pages, rank_layouts
from pdserve.ranks.replica import Replica
from pdserve.ranks.runner import ParallelRunner
from pdserve.sched.plan import PageReady, Preempted
from pdserve.types import Role, SamplingParams
from tests.support import tiny_models, tiny_moe
from tests.support.engine_driver import EngineDriver
from tests.support.process_tree import rank_processes

PAGE, EACH = 16, 9
Model = tuple[str, LoadedModel]
MODELS = {"mixtral": tiny_moe.mixtral, "deepseek": tiny_moe.deepseek_v3}
LIMIT = 20_000
"""Steps after which a rebalance is not coming to an end."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that a test overloads is no death: silence counts later, here and in the ranks."""
    monkeypatch.setattr(beats, "SILENT_S", 4.0)
    monkeypatch.setenv("PDSERVE_TESTING", "1")
    monkeypatch.setenv("PDSERVE_FAILPOINTS", "rank_silence=set:30")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_models.save(make(), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


def config_of(folder: str | Path, tp: int, **fields: Any) -> WorkerConfig:
    config = WorkerConfig(
        worker_id="aggregated-0", role=Role.AGGREGATED, model=str(folder), dtype="float32", tp=tp,
        deterministic=True, page_size=PAGE, num_pages=EACH * tp, rank_attention="rows",
    )  # fmt: skip
    return dataclasses.replace(config, **fields)


@contextmanager
def serving(
    config: WorkerConfig, model: LoadedModel, run_dir: Path
) -> Iterator[tuple[ParallelRunner, list[psutil.Process], queue.Queue[str]]]:
    lost: queue.Queue[str] = queue.Queue()
    replica = Replica.launch(config, str(run_dir), launch_child, lost.put)
    try:
        runner, pool = replica.start(model, pool_id=7)
        runner._capture = True
        runner.warmup(chunk_tokens=32, max_num_seqs=2)
        replica.serve()
        ranks = rank_processes(os.getpid())
        assert len(ranks) == config.tp - 1
        yield runner, ranks, lost
    finally:
        replica.close()
        pool.close()


def driver_of(model: LoadedModel, runner: ParallelRunner | None = None) -> EngineDriver:
    return EngineDriver(
        model, num_pages=400, page_size=PAGE, chunk_tokens=16, max_num_seqs=8, capture_logits=True,
        runner=runner,
    )  # fmt: skip


def ask(driver: EngineDriver, begun: int = 0) -> None:
    """Prompts with beginnings in common, half of them greedy; the first six are more than the pool holds."""
    shared = [[(7 * n + 3 * i) % 250 for i in range(40)] for n in range(2)]
    for n in range(begun, begun + 6):
        tokens = [*shared[n % 2], *((11 * n + i) % 250 for i in range(5 + 3 * n))]
        sampling = SamplingParams(
            max_tokens=24 + n, temperature=0.0 if n % 3 else 1.1, seed=n, ignore_eos=True
        )
        driver.submit(f"s{n}", tokens, sampling)
    driver.run()
    assert not driver.failed


@pytest.mark.parametrize(
    ("name", "dtype", "tp"),
    [
        ("mixtral", "float32", 2),
        ("deepseek", "bfloat16", 3),
        pytest.param("mixtral", "bfloat16", 3, marks=pytest.mark.full),
        pytest.param("deepseek", "float32", 2, marks=pytest.mark.full),
    ],
)
def test_tokens_and_logits_are_those_of_one_device_through_preemption_and_hits(
    name: str, dtype: str, tp: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(str(folders[name]), dtype)
    alone = driver_of(model)
    ask(alone)
    ask(alone, 6)
    with serving(config_of(folders[name], tp, dtype=dtype), model, tmp_path) as (runner, _, lost):
        assert runner.numerics_id == alone.runner.numerics_id
        assert runner.num_pages == tp * EACH
        found = driver_of(model, runner)
        ask(found)
        ask(found, 6)
        assert found.tokens == alone.tokens
        for seq_id, rows in alone.logits.items():
            assert torch.equal(torch.stack(found.logits[seq_id]), torch.stack(rows)), seq_id
        homes = [{runner.homes.home(page) for page in step.pages} for p in found.plans for step in p.seqs]
        assert all(len(of_step) == 1 for of_step in homes)
        assert set().union(*homes) == set(range(tp)), "every rank had sequences"
        seen = Counter(type(event) for event in found.events)
        assert seen[Preempted] > 0
        assert any(isinstance(event, PageReady) and event.cached for event in found.events)
        assert found.manager.idle
        assert found.manager.check_integrity() == ""
        assert lost.empty()


def test_experts_move_between_ranks_that_have_unlike_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    """The canary of a new table gets rows of its own, on all ranks at once."""
    model = load_model(str(folders["mixtral"]), "float32")
    alone = driver_of(model)
    ask(alone)
    with serving(config_of(folders["mixtral"], 2, expert_slots=5), model, tmp_path) as (runner, _, lost):
        rebalancing = runner.rebalancing
        assert rebalancing is not None
        table = rebalancing.status.table
        loads = [
            [100.0 / (1 + (e + layer) % 6) ** 1.5 for e in range(6)] for layer in range(table.num_layers)
        ]
        wanted = plan(loads, table.topology, table.slots_per_rank, current=table).table
        assert wanted.copies_from(table)
        rebalancing.offer(wanted)
        found = driver_of(model, runner)
        ask(found)
        steps = 0
        while rebalancing.busy:
            runner.idle_step()
            steps += 1
            assert steps < LIMIT
        assert rebalancing.status.outcomes == {"done": 1}
        assert rebalancing.status.table == wanted
        assert found.tokens == alone.tokens
        again = driver_of(model, runner)
        ask(again)
        assert again.tokens == alone.tokens
        load, expected = runner.expert_load, alone.runner.expert_load
        assert load is not None
        assert expected is not None
        assert load.counts_LX.sum() > expected.counts_LX.sum() > 0, "rank 0 counts every rank's tokens"
        assert lost.empty()


def test_a_lost_rank_ends_the_replica_for_its_pages_are_gone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(str(folders["mixtral"]), "float32")
    with serving(config_of(folders["mixtral"], 2), model, tmp_path) as (runner, ranks, lost):
        ranks[0].send_signal(signal.SIGKILL)
        assert "rank 1 ended" in lost.get(timeout=10)
        with pytest.raises(WorkerLost, match="this replica is over"):
            ask(driver_of(model, runner))


@pytest.mark.parametrize("name", MODELS)
def test_memory_divides(name: str, folders: dict[str, Path]) -> None:
    """The same memory holds as many times the pages of `repeated` as there are ranks; dividing heads divides
    no latent rows."""
    model = load_model(str(folders[name]), "float32").config
    pages = {}
    for attention in ("divided", "repeated", "rows"):
        config = config_of(
            folders[name], 2, num_pages=None, kv_memory_bytes=1 << 20, rank_attention=attention
        )
        pages[attention] = pool_pages(config, rank_layouts(config, model))
    assert pages["rows"] == 2 * pages["repeated"]
    assert (pages["divided"] == pages["repeated"]) == (name == "deepseek")
    assert pool_pages(config_of("m", 3, num_pages=20), rank_layouts(config_of("m", 3), model)) == 18
    tight = config_of("m", 3, num_pages=5)
    with pytest.raises(ConfigError, match="two KV pages of this model on each rank"):
        pool_pages(tight, rank_layouts(tight, model))


def test_what_does_not_go_with_it_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nixl"):
        config_of("m", 2, role=Role.DECODE, transports=("nixl",))
    assert ServeConfig(rank_attention="rows").rank_attention == "rows"
    path = tiny_models.save(tiny_moe.mixtral(), tmp_path / "gshard") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pdserve_router": {"kind": "gshard"}}))
    model = load_model(str(path.parent), "float32")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    replica = Replica.launch(config_of(path.parent, 2), str(run_dir), launch_child, pytest.fail)
    try:
        with pytest.raises(ConfigError, match="rows is not for routers with a capacity"):
            replica.start(model, pool_id=7)
    finally:
        replica.close()
