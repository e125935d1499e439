"""Prefill and decode workers of unlike precision on real gRPC and data plane: each phase in its own form."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdserve.config.serve import ServeConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.types import HandoverMode, Role
from pdserve.worker.host import WorkerHost
from tests.support import direct as dx

WEIGHTS = {Role.PREFILL: "w8a8", Role.DECODE: "w4a8"}
PROMPT = tuple(100 + (i * 104729) % 40000 for i in range(150))


@pytest.fixture(scope="module")
def fleet() -> Iterator[dx.Direct]:
    secret = secrets.token_bytes(32)
    base = WorkerConfig(
        worker_id="w", role=Role.PREFILL, model=dx.MODEL, fleet_secret=secret.hex(), kv_mixing="relaxed",
        num_pages=120, prefill_chunk_tokens=64, token_budget=128, threads=2,
    )  # fmt: skip
    hosts = {
        role: WorkerHost(replace(base, worker_id=str(role), role=role, weights=weights))
        for role, weights in WEIGHTS.items()
    }
    made = dx.Direct(secret=secret, prefill=hosts[Role.PREFILL], decode=hosts[Role.DECODE])
    made.records = {role: host.start() for role, host in hosts.items()}
    yield made
    made.stop()


async def test_a_prompt_in_8_bits_is_continued_in_4(fleet: dx.Direct) -> None:
    ask = fleet.ask(PROMPT)
    tokens, ended = await dx.generate(ask)
    assert len(tokens) == ask.sampling.max_tokens
    ledger = ended.ledger
    assert (ledger.prefill_computed_tokens, ledger.decode_computed_prompt_tokens) == (150, 0)
    assert ledger.transfer.pages == 10
    again, _ = await dx.generate(fleet.ask(PROMPT, use_prefix_cache=False))
    assert again == tokens
    await fleet.until_idle()


async def test_decode_alone_computes_in_its_own_form(fleet: dx.Direct) -> None:
    ask = fleet.ask(PROMPT, mode=HandoverMode.LOCAL, use_prefix_cache=False)
    tokens, ended = await dx.generate(ask)
    assert len(tokens) == ask.sampling.max_tokens
    assert ended.ledger.decode_computed_prompt_tokens == 150


def test_numerics_name_the_form(fleet: dx.Direct) -> None:
    prefill, decode = fleet.prefill._engine, fleet.decode._engine
    assert prefill is not None
    assert decode is not None
    assert prefill.runner.numerics_id != decode.runner.numerics_id


class TestSettings:
    def test_each_role_gets_its_form(self) -> None:
        config = ServeConfig(prefill_weights="w8a8", decode_weights="w4a8").resolved()
        made = {role: config.worker(role, secret="", routers=(), run_dir="") for role in WEIGHTS}
        assert {role: worker.weights for role, worker in made.items()} == WEIGHTS

    def test_several_ranks_are_exact(self) -> None:
        with pytest.raises(ConfigError, match="decode_weights"):
            ServeConfig(prefill_weights="w8a8", decode_weights="w8a8", decode_tp=2).resolved()
        with pytest.raises(ConfigError, match="one rank"):
            WorkerConfig(worker_id="w", role=Role.DECODE, model="m", weights="w4a8", tp=2)
