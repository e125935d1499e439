"""Mixtures under `pdserve up`, real Ray: a plan for experts for each role, a rank lost while requests run.

The oracle is the single-device engine.
"""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from pdserve.cli.main import app
from pdserve.client import Client, Stream
from pdserve.errors import DeadlineExpired
from pdserve.models.loader import load_model
from tests.integration.test_bridge_experts import homes_of, placed
from tests.integration.test_lost_rank import RANKS, everywhere_twice
from tests.integration.test_parallel_fleet import LIMIT_S, ranks_of, until_new, up, workers
from tests.support import tiny_models, tiny_moe
from tests.support.engine_driver import EngineDriver, generate

PROMPTS = {"a": [7 * i % 250 for i in range(1, 90)], "b": [11 * i % 250 for i in range(1, 60)]}
LENGTH = 120


def expected(model: Path) -> dict[str, list[int]]:
    driver = EngineDriver(load_model(str(model), "float32"), num_pages=64, chunk_tokens=64)
    return {name: tokens[:LENGTH] for name, tokens in generate(driver, PROMPTS, LENGTH).items()}


def test_each_role_has_its_own_plan_and_latent_pages_hand_over(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_moe.deepseek_v3(max_position_embeddings=1024), tmp_path / "model")
    facts = load_model(str(model), "float32").config
    narrow = placed(facts, 2, 2, tmp_path / "narrow.json")
    wide = placed(facts, 3, 0, tmp_path / "wide.json")
    flags = (
        "--prefill-tp", "2", "--prefill-experts", str(tmp_path / "narrow.json"), "--decode-page-size", "32",
        "--decode-tp", "3", "--decode-experts", str(tmp_path / "wide.json"), "--lease-s", "30",
    )  # fmt: skip
    right = expected(model)
    with up(model, *flags) as (process, address), Client(address) as client:
        assert len(ranks_of(process)) == 3
        for name, ids in PROMPTS.items():
            made = client.generate(token_ids=ids, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
            result = made.result()
            assert list(result.token_ids) == right[name]
            assert result.ledger.decode_computed_prompt_tokens == 0
            assert result.ledger.transfer.pages == -(-len(ids) // 16)
        homes = {report.name: report.homes for report in client.get_experts()}
    assert homes == {"prefill-0": homes_of(narrow), "decode-0": homes_of(wide)}


def metrics_url(process: subprocess.Popen[str]) -> str:
    """As `pdserve up` says below the line that it is ready."""
    assert process.stdout is not None
    while not (found := re.search(r"metrics on (\S+);", line := process.stdout.readline())):
        assert line, "it ended"
    return found[1]


def gauge(url: str, name: str) -> dict[str, float]:
    """A metric of the router by role."""
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        sample.labels["role"]: sample.value for family in families for sample in family.samples
        if sample.name == name
    }  # fmt: skip


def ask(client: Client, name: str, **options: Any) -> Stream:
    return client.generate(
        token_ids=PROMPTS[name], max_tokens=LENGTH, temperature=0.0, ignore_eos=True, **options
    )


def running(client: Client) -> dict[str, Stream]:
    """All prompts at once, each with its first token."""
    streams = {name: ask(client, name) for name in PROMPTS}
    for stream in streams.values():
        next(iter(stream))
    return streams


def tokens_of(streams: dict[str, Stream]) -> dict[str, list[int]]:
    return {name: list(stream.result().token_ids) for name, stream in streams.items()}


def counted(url: str, lost: int) -> None:
    """Waits until the router's metrics count so many lost ranks."""
    began = time.monotonic()
    while gauge(url, "pdserve_lost_ranks")["aggregated"] != lost:
        assert time.monotonic() < began + LIMIT_S
    print(f"{lost} lost ranks counted after {time.monotonic() - began:.2f} s")


def test_a_lost_rank_fails_no_request_and_experts_without_a_home_none_that_waits(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_moe.mixtral(max_position_embeddings=1024), tmp_path / "model")
    placement = everywhere_twice(load_model(str(model), "float32").config.num_layers, tmp_path / "placement")
    flags = (
        "--aggregated", "1", "--aggregated-tp", str(RANKS), "--rank-attention", "repeated",
        "--aggregated-experts", placement, "--rebalance-gain", "0",
    )  # fmt: skip
    right = expected(model)
    with up(model, *flags) as (process, address), Client(address) as client:
        url = metrics_url(process)
        assert gauge(url, "pdserve_lost_ranks") == {"prefill": 0, "decode": 0, "aggregated": 0}
        before = workers(address)
        first, second = ranks_of(process)
        streams = running(client)
        first.kill()
        counted(url, 1)
        assert tokens_of(streams) == right
        assert workers(address) == before, "it is the same worker, degraded"
        check_report(client, address)
        streams = running(client)
        second.kill()  # nobody has its experts now
        with pytest.raises(DeadlineExpired):
            ask(client, "a", deadline_s=1.0).result()
        assert tokens_of(streams) == right
        until_new(address, before)  # the next incarnation
        counted(url, 0)
        assert tokens_of(running(client)) == right


def check_report(client: Client, address: str) -> None:
    """`pdserve experts` shows the one rank that is lost, and no home on it."""
    (report,) = client.get_experts()
    (lost,) = report.lost_ranks
    slots = range(lost * report.slots_per_rank, (lost + 1) * report.slots_per_rank)
    assert not any(slot in slots for layer in report.homes for homes in layer for slot, _ in homes)
    said = CliRunner().invoke(app, ["experts", "--address", address]).output
    assert f"goes on without rank {lost}" in said
