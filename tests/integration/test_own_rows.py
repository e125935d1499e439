"""Ranks with sequences of their own: the bits of one device, pages on one rank alone, and what is refused.

The oracle is the single-device runner. Ranks are real processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.models.loader import load_model
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_to_json
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Topology
from tests.support import tiny_models, tiny_moe
from tests.support.own_rows_cases import EACH, run, runner_over
from tests.support.rank_kit import run_ranks

MODELS = {
    "mixtral": tiny_moe.mixtral,
    "qwen2moe": lambda: tiny_moe.qwen2_moe(mlp_only_layers=[0]),
    "olmoe": tiny_moe.olmoe,
    "deepseek3": tiny_moe.deepseek_v3,
    "llama": tiny_models.llama,
}
"""Uneven runs of experts; a dense layer and a shared expert; norms over all heads together, which no rank
divides here; latent attention; no experts at all."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    folders = {n: tiny_models.save(make(), tmp_path_factory.mktemp(n)) for n, make in MODELS.items()}
    return [[str(folder), dtype] for folder in folders.values() for dtype in ("float32", "bfloat16")]


def placed(case: list[Any], size: int) -> list[Any]:
    """The case with a placement that has replicas, if the model has experts."""
    config = load_model(*case).config
    if config.experts is None:
        return case
    layers = tuple(layer for layer in range(config.num_layers) if config.has_experts(layer))
    number = config.experts.num_experts
    loads = tuple(
        tuple(float((expert + layer) % number) ** 3 for expert in range(number)) for layer in layers
    )
    table = plan(loads, Topology(num_nodes=1, ranks_per_node=size), -(-number // size) + 1).table
    return [*case, snapshot_to_json(ExpertSnapshot(name="", layers=layers, loads=loads, table=table))]


@pytest.mark.parametrize(("size", "exchange"), [(2, "shm"), (3, "gloo")])
def test_ranks_compute_the_bits_of_one_device_each_on_its_own_pages(
    size: int, exchange: str, cases: list[list[Any]], tmp_path: Path
) -> None:
    wanted = cases if size == 2 else [placed(case, size) for case in cases]
    told = run_ranks(size, "tests.support.own_rows_cases:steps", tmp_path, exchange=exchange, cases=wanted)
    for number, case in enumerate(cases):
        alone = runner_over(load_model(*case), size)
        expected, logits = run(alone, size)
        assert np.load(tmp_path / f"logits-{number}.npy").tobytes() == b"".join(r.tobytes() for r in logits)
        steps = told[0][number]["steps"]
        assert [failed for _, failed in steps if failed] == [
            {"x": "its block table names pages of several ranks"}
        ]
        for (tokens, _), (alone_tokens, _) in zip(steps, expected, strict=True):
            assert tokens == {name: token for name, token in alone_tokens.items() if name != "x"}
        for rank, of_rank in enumerate(told):
            assert of_rank[number]["numerics"] == alone.numerics_id
            assert {page // EACH for page in of_rank[number]["written"]} == {rank}
