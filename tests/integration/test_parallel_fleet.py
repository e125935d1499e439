"""Workers of several ranks under `pdserve up` on real Ray: the tokens of one device, and the death of a rank.

The model has the default one's widths and heads with fewer layers; the oracle is the single-device engine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pdserve.client import Client
from pdserve.models.loader import load_model
from tests.support import tiny_models
from tests.support.engine_driver import EngineDriver, generate
from tests.support.process_tree import command_line

LIMIT_S = 60.0
PROMPTS = {"a": [7 * i % 250 for i in range(1, 90)], "b": [11 * i % 250 for i in range(1, 60)]}
LENGTH = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_models.llama(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    return tiny_models.save(made, tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    driver = EngineDriver(load_model(str(model), "float32"), num_pages=64, chunk_tokens=64)
    return {name: tokens[:LENGTH] for name, tokens in generate(driver, PROMPTS, LENGTH).items()}


@contextmanager
def up(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `pdserve up` and its address; nothing of it is left afterwards."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "pdserve.cli", "up", "--port=0", "--metrics-port=0", "--http-port=0",
            "--model", str(model), "--dtype", "float32", "--deterministic", "--kv-memory", "32MiB",
            "--prefill-chunk-tokens", "64", *flags,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    tree: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while "ready on " not in (line := process.stdout.readline()):
            assert line, "".join(lines)
            lines.append(line)
        found = re.search(r"ready on (\S+)", line)
        assert found is not None
        yield process, found[1]
        tree = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.stdout.read()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [p for p in tree if p.is_running()] == []


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of ranks other than the leaders'."""
    tree = psutil.Process(process.pid).children(recursive=True)
    return [p for p in tree if any("RankActor" in part for part in command_line(p))]


def workers(address: str) -> dict[str, tuple[int, int]]:
    """(pid of the leader, incarnation) of every worker that the router counts on."""
    with Client(address) as client:
        return {
            w.record.peer.worker_id: (w.record.pid, w.record.peer.incarnation)
            for w in client.get_status().workers
            if not w.suspect and w.load.ready
        }


def test_three_ranks_say_what_one_device_says(model: Path, expected: dict[str, list[int]]) -> None:
    with up(model, "--aggregated", "1", "--aggregated-tp", "3") as (process, address):
        assert len(ranks_of(process)) == 2
        with Client(address) as client:
            streams = {
                name: client.generate(token_ids=ids, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
                for name, ids in PROMPTS.items()
            }
            found = {name: list(stream.result().token_ids) for name, stream in streams.items()}
        assert found == expected


def test_a_killed_rank_takes_its_replica_along_and_no_other(
    model: Path, expected: dict[str, list[int]]
) -> None:
    with up(model, "--aggregated", "2", "--aggregated-tp", "2") as (process, address):
        before = workers(address)
        assert set(before) == {"aggregated-0", "aggregated-1"}
        with Client(address) as client:
            streams = {
                name: client.generate(token_ids=ids, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
                for name, ids in PROMPTS.items()
            }
            for stream in streams.values():
                next(iter(stream))  # both run by now, each on a replica of its own
            ranks_of(process)[0].kill()
            found = {name: list(stream.result().token_ids) for name, stream in streams.items()}
        assert found == expected, "the router went on with it elsewhere"
        after = until_new(address, before)
        assert sum(after[name] == before[name] for name in before) == 1, "one replica is as it was"
        assert len(ranks_of(process)) == 2
        status = subprocess.run(
            [sys.executable, "-m", "pdserve.cli", "status", "--json", "--address", address],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert len(json.loads(status.stdout)["workers"]) == 2


def until_new(address: str, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The workers once all of them serve and one is new."""
    end = time.monotonic() + LIMIT_S
    while True:
        now = workers(address)
        if set(now) == set(before) and now != before:
            return now
        assert time.monotonic() < end, now


def test_prefill_and_decode_of_other_ranks_and_page_sizes_hand_over(
    model: Path, expected: dict[str, list[int]]
) -> None:
    flags = ("--prefill-tp", "2", "--decode-tp", "3", "--prefill-page-size", "32", "--decode-page-size", "16")
    with up(model, *flags, "--lease-s", "30") as (process, address):
        assert len(ranks_of(process)) == 3
        with Client(address) as client:
            assert client.get_status().pairing_problems == ()
            for name, ids in PROMPTS.items():
                made = client.generate(token_ids=ids, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
                result = made.result()
                assert list(result.token_ids) == expected[name]
                assert result.ledger.decode_computed_prompt_tokens == 0
                assert result.ledger.transfer.pages == -(-len(ids) // 32)
