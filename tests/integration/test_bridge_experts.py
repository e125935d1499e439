"""Mixtures whose experts and pages lie otherwise on either side hand over: one device's tokens.

Prefill is narrow and redundant (two ranks, hot experts on both, pages of 16 tokens), decode is wide (three
ranks, one home for each expert, pages of 32). A Mixtral moves pages by KV head, a DeepSeek pages of latent
rows, which every rank has. Workers are processes, and so are their ranks; the oracle is one device's engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pdserve.models.config import ModelConfig
from pdserve.models.loader import load_model
from pdserve.parallel.expert_files import write_snapshot
from pdserve.parallel.expert_snapshot import ExpertSnapshot
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Placement, Topology
from pdserve.types import Role
from tests.integration.test_bridge import FIRST, PATIENT, THEN, expected, hand_over
from tests.support import tiny_models, tiny_moe
from tests.support.bridge_kit import Cut, Pair, config, experts_of
from tests.support.processes import WorkerProcess

SECRET = secrets.token_bytes(32)
NARROW = Cut(tp=2, page_size=16)
WIDE = Cut(tp=3, page_size=32)
MODELS = {"mixtral": tiny_moe.mixtral, "deepseek": tiny_moe.deepseek_v3}
TRANSPORTS = {"mixtral": "shm", "deepseek": "tcp"}


def placed(model: ModelConfig, ranks: int, spare: int, path: Path) -> Placement:
    """A plan for loads that fall by expert, in other order for each layer, written to a file. spare: slots on
    each rank beyond those that homes need."""
    assert model.experts is not None
    number = model.experts.num_experts
    layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
    loads = tuple(tuple(100.0 / (1 + (e + 3 * n) % number) for e in range(number)) for n in layers)
    table = plan(loads, Topology(num_nodes=1, ranks_per_node=ranks), -(-number // ranks) + spare).table
    write_snapshot(ExpertSnapshot(name="", layers=tuple(layers), loads=loads, table=table), path, "test")
    return table


def num_homes(table: Placement) -> int:
    return sum(len(homes) for layer in table.layers for homes in layer)


def homes_of(table: Placement) -> tuple[tuple[tuple[tuple[int, float], ...], ...], ...]:
    """As a worker reports them: (slot, share) pairs by layer and expert."""
    return tuple(
        tuple(tuple((home.slot, home.share) for home in homes) for homes in layer) for layer in table.layers
    )


@contextmanager
def worker(role: Role, cut: Cut, model: str, placement: Path) -> Iterator[WorkerProcess]:
    settings = config(role, cut, model, SECRET, expert_placement=str(placement))
    started = WorkerProcess(settings, **PATIENT)
    try:
        yield started
    finally:
        started.stop()


@pytest.mark.parametrize("name", MODELS)
async def test_another_plan_for_experts_on_either_side_gives_the_tokens_of_one_device(
    name: str, tmp_path: Path
) -> None:
    make: Callable[[], PreTrainedModel] = MODELS[name]
    model = str(tiny_models.save(make(), tmp_path / "model"))
    facts = load_model(model, "float32").config
    assert facts.experts is not None
    redundant = placed(facts, NARROW.tp, 2, tmp_path / "prefill.json")
    wide = placed(facts, WIDE.tp, 0, tmp_path / "decode.json")
    assert all(any(len(homes) > 1 for homes in layer) for layer in redundant.layers)
    assert num_homes(redundant) > num_homes(wide) >= facts.experts.num_experts * wide.num_layers
    with ExitStack() as stack:
        prefill = stack.enter_context(worker(Role.PREFILL, NARROW, model, tmp_path / "prefill.json"))
        decode = stack.enter_context(worker(Role.DECODE, WIDE, model, tmp_path / "decode.json"))
        right = expected(model, FIRST + THEN)
        pair = Pair(secret=SECRET, prefill=prefill.wait(), decode=decode.wait(), transport=TRANSPORTS[name])
        await hand_over(pair, right)
        for peer, table in ((pair.p, redundant), (pair.d, wide)):
            report = await experts_of(peer, SECRET)
            assert report.homes == homes_of(table), "each computes by its own plan"
            assert all(sum(loads) > 0 for loads in report.loads)
