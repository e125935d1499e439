"""A replica of two ranks without a fleet, the leader in this process: same bits, shared pools, deaths."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, WorkerLost
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.ranks.children import launch_child
from pdserve.ranks.config import RankConfig
from pdserve.ranks.replica import Replica
from pdserve.ranks.runner import ParallelRunner
from pdserve.types import Role
from pdserve.worker.host import EXIT_RETIRED
from tests.support import tiny_models
from tests.support.parallel_script import NUM_PAGES, PAGE, TABLES, run_script, script, script_runner
from tests.support.process_tree import rank_processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LoadedModel]:
    made = tiny_models.llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    folder = tiny_models.save(made, tmp_path_factory.mktemp("tiny"))
    return str(folder), load_model(str(folder), "float32")


def config_of(folder: str, **fields: object) -> WorkerConfig:
    config = WorkerConfig(
        worker_id="aggregated-0", role=Role.AGGREGATED, model=folder, dtype="float32", deterministic=True,
        page_size=PAGE, num_pages=NUM_PAGES, tp=2,
    )  # fmt: skip
    return dataclasses.replace(config, **fields)  # type: ignore[arg-type]


@contextmanager
def serving(
    model: tuple[str, LoadedModel], folder: Path
) -> Iterator[tuple[Replica, ParallelRunner, psutil.Process, queue.Queue[str]]]:
    """A replica that serves, its rank's process, and the reasons for which it was lost."""
    lost: queue.Queue[str] = queue.Queue()
    replica = Replica.launch(config_of(model[0]), str(folder), launch_child, lost.put)
    try:
        runner, pool = replica.start(model[1], pool_id=7)
        runner.warmup(chunk_tokens=32, max_num_seqs=2)
        replica.serve()
        ranks = rank_processes(os.getpid())
        yield replica, runner, ranks[-1], lost
    finally:
        replica.close()
        pool.close()
    assert list(folder.iterdir()) == []


def test_two_ranks_do_what_one_does_and_the_leader_sees_all_pages(
    model: tuple[str, LoadedModel], tmp_path: Path
) -> None:
    alone = script_runner(model[1], deterministic=True)
    expected, _ = run_script(alone)
    with serving(model, tmp_path) as (replica, runner, rank, lost):
        assert runner.numerics_id == alone.numerics_id
        assert [runner.execute(plan).tokens for plan in script(runner.config.vocab_size)] == expected
        for page in TABLES["a"]:
            parts = [_heads(replica.pools.page_view(r, page), replica.pools.layout(r)) for r in range(2)]
            whole = _heads(alone._pool.page_view(page), alone._pool.layout)
            assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()
        replica.pools.page_view(1, 3)[:4] = b"here"
        assert bytes(replica.pools.page_view(1, 3)[:4]) == b"here"
        assert lost.empty()
    assert not rank.is_running()
    assert lost.empty()


def _heads(page: memoryview, layout: object) -> np.ndarray:
    """[parts, KV heads, elements of a head]."""
    return np.frombuffer(page, np.float32).reshape(-1, layout.num_kv_heads, layout.head_dim * PAGE)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("end", "reason"), [(signal.SIGKILL, "rank 1 ended"), (signal.SIGSTOP, "rank 1 has been silent")]
)
def test_a_rank_that_dies_or_stands_still_ends_the_replica(
    model: tuple[str, LoadedModel], tmp_path: Path, end: signal.Signals, reason: str
) -> None:
    with serving(model, tmp_path) as (_, runner, rank, lost):
        rank.send_signal(end)
        assert reason in lost.get(timeout=10)
        rank.wait(10)  # a stopped process too: the group ends as a unit
        with pytest.raises(WorkerLost, match="this replica is over"):
            runner.execute(next(script(runner.config.vocab_size)))
        assert lost.empty()


@contextmanager
def worker(folder: str, run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """`python -m pdserve.worker` with two ranks that serves, and its rank's process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(config_of(folder, run_dir=str(run_dir), fleet_secret="ab" * 32).to_json())
        process.stdin.close()
        assert process.stdout.readline(), "it did not start"
        (rank,) = psutil.Process(process.pid).children()
        yield process, rank
    finally:
        process.kill()
        process.wait()


def test_a_worker_whose_rank_stands_still_ends_so_that_it_is_started_again(
    model: tuple[str, LoadedModel], tmp_path: Path
) -> None:
    with worker(model[0], tmp_path) as (process, rank):
        rank.send_signal(signal.SIGSTOP)
        assert process.wait(10) == EXIT_RETIRED
        rank.wait(10)


def test_ranks_of_a_killed_leader_end_by_themselves(model: tuple[str, LoadedModel], tmp_path: Path) -> None:
    with worker(model[0], tmp_path) as (process, rank):
        process.kill()
        rank.wait(10)


class _Ended:
    """A rank's process that was over before it began."""

    def ended(self) -> bool:
        return True

    def kill(self) -> None:
        return


def _never(config: RankConfig) -> _Ended:
    return _Ended()


def _broken(config: RankConfig) -> object:
    worker = dataclasses.replace(config.worker_config, model="/nowhere/at/all")
    return launch_child(dataclasses.replace(config, worker=worker.to_json()))


@pytest.mark.parametrize(
    ("launch", "sentence"), [(_never, "rank 1 of this replica ended"), (_broken, "There is no such model")]
)
def test_a_rank_that_can_not_start_is_an_error_of_the_start(
    model: tuple[str, LoadedModel], tmp_path: Path, launch: Callable[..., object], sentence: str
) -> None:
    replica = Replica.launch(config_of(model[0]), str(tmp_path), launch, pytest.fail)  # type: ignore[arg-type]
    try:
        with pytest.raises(Exception, match=sentence):
            replica.start(model[1], pool_id=7)
    finally:
        replica.close()
    assert list(tmp_path.iterdir()) == []


def test_several_ranks_hand_over_by_any_way_but_nixl() -> None:
    assert config_of("m", role=Role.DECODE).tp == 2
    with pytest.raises(ConfigError, match="transports: nixl moves pages of workers with one rank only"):
        config_of("m", role=Role.DECODE, transports=("nixl", "tcp"))
