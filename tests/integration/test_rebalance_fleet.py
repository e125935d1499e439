"""Experts that move under `pdserve up` while requests run: asked for by a client, told of by the worker.

Real Ray, two ranks, a tiny Mixtral; the oracle is the single-device engine.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.api import ExpertReport
from pdserve.cli.main import app
from pdserve.client import Client
from pdserve.models.loader import load_model
from tests.integration.test_parallel_fleet import up
from tests.support import tiny_models, tiny_moe
from tests.support.engine_driver import EngineDriver, generate

LIMIT_S = 60.0
LENGTH = 150
PROMPTS = {"a": [7 * i % 250 for i in range(1, 90)], "b": [11 * i % 250 for i in range(1, 60)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_moe.mixtral(max_position_embeddings=1024)
    return tiny_models.save(made, tmp_path_factory.mktemp("moe"))


def answered(client: Client) -> dict[str, list[int]]:
    streams = {
        name: client.generate(token_ids=ids, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        for name, ids in PROMPTS.items()
    }
    return {name: list(stream.result().token_ids) for name, stream in streams.items()}


def rested(client: Client) -> ExpertReport:
    """The worker's report once no experts move."""
    end = time.monotonic() + LIMIT_S
    while (report := client.get_experts()[0]).rebalancing:
        assert time.monotonic() < end
    return report


def test_experts_move_under_requests_and_no_text_changes(model: Path) -> None:
    driver = EngineDriver(load_model(str(model), "float32"), num_pages=64, chunk_tokens=64)
    expected = {name: tokens[:LENGTH] for name, tokens in generate(driver, PROMPTS, LENGTH).items()}
    flags = ("--aggregated", "1", "--aggregated-tp", "2", "--expert-slots", "4", "--rebalance-gain", "0")
    with up(model, *flags) as (_, address), Client(address) as client:
        assert answered(client) == expected  # and there are loads to plan for
        before = client.get_experts()[0]
        assert before.slots_per_rank == 4
        found: list[dict[str, list[int]]] = []
        load = threading.Thread(target=lambda: found.extend(answered(client) for _ in range(3)))
        load.start()
        (answer,) = client.rebalance_experts()
        assert answer.started, answer
        assert answer.copies > 0
        load.join(LIMIT_S)
        report = rested(client)
        assert found == [expected] * 3
        assert report.last_rebalance == "done"
        assert report.homes != before.homes
        assert answered(client) == expected
        said = CliRunner().invoke(app, ["experts", "--rebalance", "--address", address]).output
        assert "aggregated-0: experts" in said
        end = time.monotonic() + LIMIT_S
        while not (load_now := client.get_status().workers[0].load).rebalances_done:  # by heartbeat
            assert time.monotonic() < end
        assert load_now.expert_copied_bytes > 0
        assert load_now.expert_imbalance >= 1
        assert 0 < load_now.expert_balance_loss < len(before.homes[0])
        assert all(0 < loss < len(before.homes[0]) for loss in report.balance_losses)
