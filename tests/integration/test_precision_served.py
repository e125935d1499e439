"""`--precision fast` for real: the default model through `pdserve up`, and a checkpoint with a form for each
role, written by `pdserve quantize`, on real gRPC and data plane."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli.quantize import run, wish_of
from pdserve.config.precision import Wish
from pdserve.config.serve import DEFAULT_MODEL
from pdserve.config.worker import WorkerConfig
from pdserve.types import Role
from pdserve.worker.host import WorkerHost
from pdserve.worker.precision import chosen
from tests.integration.test_up import Up, read_until, start
from tests.support import direct as dx
from tests.support import tiny_models


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    process = start("--precision", "fast", "--kv-memory", "128MiB")
    try:
        lines = read_until(process, "ready on ")
        found = re.search(r"ready on (\S+) after ", lines[-1])
        assert found is not None
        yield Up(process, found[1], lines)
    finally:
        process.kill()
        process.wait()


def test_up_says_what_workers_chose_and_the_text_makes_sense(up: Up) -> None:
    text = "".join(up.lines)
    for role in (Role.PREFILL, Role.DECODE):
        choice = chosen(Wish(role=role, precision="fast"), DEFAULT_MODEL)
        assert choice.weights != "exact"
        assert re.search(rf"{role}-0: starting, .*{choice.weights}", text)
    answer = up.run(
        "generate", "The capital of France is", "--max-tokens", "6", "--temperature", "0", "--json"
    )
    found = json.loads(answer.stdout)
    assert "Paris" in found["text"]
    assert found["computed"]["decode_prompt_tokens"] == 0
    assert found["transfer"]["pages"] == 1


@pytest.fixture(scope="module")
def two_forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    source = tiny_models.save(tiny_models.llama(tie_word_embeddings=True), folder / "model")
    words = (" ".join(f"w{(row + 7 * word) % 250}" for word in range(30)) for row in range(25))
    (folder / "text.txt").write_text("\n\n".join(words))
    wish = wish_of(
        prefill="w8a8-smoothquant", decode="w4a16-awq", calibration=folder / "text.txt", evaluate=None,
        calibration_tokens=300, evaluation_tokens=200, dtype="bfloat16", fold_values=False,
    )  # fmt: skip
    run(str(source), folder / "out", wish)
    return folder / "out"


async def test_each_role_loads_its_form_of_a_quantised_checkpoint(two_forms: Path) -> None:
    secret = secrets.token_bytes(32)
    base = WorkerConfig(
        worker_id="w", role=Role.PREFILL, model=str(two_forms), fleet_secret=secret.hex(), precision="fast",
        num_pages=60, prefill_chunk_tokens=64, token_budget=128, threads=2,
    )  # fmt: skip
    roles = (Role.PREFILL, Role.DECODE)
    hosts = {role: WorkerHost(replace(base, worker_id=str(role), role=role)) for role in roles}
    fleet = dx.Direct(secret=secret, prefill=hosts[Role.PREFILL], decode=hosts[Role.DECODE])
    try:
        fleet.records = {role: host.start() for role, host in hosts.items()}
        forms = {role: host.settings()["weights"] for role, host in hosts.items()}
        assert forms == {
            role: chosen(Wish(role=role, precision="fast"), str(two_forms)).weights for role in roles
        }
        tokens, ended = await dx.generate(fleet.ask(tuple(range(1, 120))))
        assert len(tokens) == 8
        assert (ended.ledger.transfer.pages, ended.ledger.decode_computed_prompt_tokens) == (8, 0)
        await fleet.until_idle()
    finally:
        fleet.stop()
