"""Experts over 2, 3 and 4 ranks: the bits of one device, and an upcycled model's text.

The oracle is the single-device runner. Ranks are real processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ConfigError
from pdserve.models.loader import load_model
from pdserve.models.sharded import shard_config
from pdserve.models.sharded_experts import expert_slots, split_experts
from pdserve.models.upcycle import Upcycling, upcycle
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_to_json
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Topology, contiguous
from pdserve.parallel.shards import shards
from tests.support import tiny_models, tiny_moe
from tests.support.parallel_script import run_script, script_runner
from tests.support.rank_kit import run_ranks

MODELS = {
    "mixtral": tiny_moe.mixtral,
    "qwen2moe": lambda: tiny_moe.qwen2_moe(mlp_only_layers=[0]),
    "qwen3moe": tiny_moe.qwen3_moe,
    "gshard": tiny_moe.mixtral,
    "deepseek2": lambda: tiny_moe.deepseek_v2(attention_bias=True),
    "deepseek3": tiny_moe.deepseek_v3,
}
"""Uneven runs of experts; a dense layer and a shared expert; norms on heads; a router with a random state;
latent attention without and with a low rank for queries.
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    folders = {n: tiny_models.save(make(), tmp_path_factory.mktemp(n)) for n, make in MODELS.items()}
    path = folders["gshard"] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pdserve_router": {"kind": "gshard"}}))
    return [[str(folder), dtype, True] for folder in folders.values() for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def alone(cases: list[list[Any]]) -> list[tuple[Any, np.ndarray]]:
    return [run_script(script_runner(load_model(m, dtype), deterministic=mode)) for m, dtype, mode in cases]


@pytest.mark.parametrize(
    ("size", "exchange", "steps"),
    [
        (2, "shm", "rank_cases:same_steps"),
        (4, "shm", "exchange_cases:steps_all_to_all"),
        (3, "gloo", "exchange_cases:steps_all_to_all"),
    ],
)
def test_ranks_compute_the_bits_of_one_device(
    size: int,
    exchange: str,
    steps: str,
    cases: list[list[Any]],
    alone: list[tuple[Any, np.ndarray]],
    tmp_path: Path,
) -> None:
    """Rows of these few tokens gathered, as they would be, and by all-to-all."""
    told = run_ranks(size, f"tests.support.{steps}", tmp_path, exchange=exchange, cases=cases)
    for number, (tokens, logits) in enumerate(alone):
        assert np.load(tmp_path / f"logits-{number}.npy").tobytes() == logits.tobytes(), cases[number]
        assert told[0][number]["tokens"] == tokens


def test_latent_attention_that_adds_over_ranks_stays_near(
    cases: list[list[Any]], alone: list[tuple[Any, np.ndarray]], tmp_path: Path
) -> None:
    """Not deterministic: 128 roundings of float32, as for other models (test_parallel_exactness)."""
    number = len(cases) - 2
    (folder, dtype, _), wanted = cases[number], alone[number][1]
    assert dtype == "float32"
    plain = [[folder, dtype, False]]
    run_ranks(2, "tests.support.rank_cases:same_steps", tmp_path, exchange="shm", cases=plain)
    found = np.load(tmp_path / "logits-0.npy")
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) <= 2.0**-17


def test_upcycled_experts_over_ranks_say_what_the_dense_model_says(tmp_path: Path) -> None:
    """EP 1 to 4 of a mixture of five copies, against the dense model on one device."""
    dense = load_model(str(tiny_models.save(tiny_models.mistral(), tmp_path / "dense")))
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=5, top_k=2))
    tokens, logits = run_script(script_runner(dense, deterministic=True))
    cases = [[str(tmp_path / "moe"), "bfloat16", True]]
    for size in (1, 2, 3, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        told = run_ranks(size, "tests.support.rank_cases:same_steps", folder, exchange="shm", cases=cases)
        assert np.load(folder / "logits-0.npy").tobytes() == logits.tobytes()
        assert told[0][0]["tokens"] == tokens


@pytest.mark.parametrize("size", [2, 3])
def test_a_placement_with_replicas_has_the_bits_of_one_device(
    size: int, cases: list[list[Any]], alone: list[tuple[Any, np.ndarray]], tmp_path: Path
) -> None:
    placed = []
    for folder, dtype, mode in cases:
        config = load_model(folder, dtype).config
        layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
        assert config.experts is not None
        number = config.experts.num_experts
        loads = tuple(
            tuple(float((expert + layer) % number) ** 3 for expert in range(number)) for layer in layers
        )
        table = plan(loads, Topology(num_nodes=1, ranks_per_node=size), -(-number // size) + 1).table
        assert any(len(homes) > 1 for layer in table.layers for homes in layer)
        snapshot = ExpertSnapshot(name="", layers=tuple(layers), loads=loads, table=table)
        placed.append([folder, dtype, mode, snapshot_to_json(snapshot)])
    told = run_ranks(size, "tests.support.rank_cases:same_steps", tmp_path, exchange="shm", cases=placed)
    for number, (tokens, logits) in enumerate(alone):
        assert np.load(tmp_path / f"logits-{number}.npy").tobytes() == logits.tobytes(), placed[number]
        assert told[0][number]["tokens"] == tokens


def test_a_placement_of_another_model_or_size_is_refused(cases: list[list[Any]], tmp_path: Path) -> None:
    config = load_model(cases[0][0]).config
    number = config.num_layers
    for layers, experts, ranks, words in (
        (number + 1, 6, 2, "model"),
        (number, 5, 2, "model"),
        (number, 6, 3, "2 ranks"),
    ):
        table = contiguous(layers, experts, Topology(num_nodes=1, ranks_per_node=ranks), 6)
        with pytest.raises(ConfigError, match=words):
            split_experts(config, 2, table)
    dense = load_model(str(tiny_models.save(tiny_models.mistral(), tmp_path))).config
    with pytest.raises(ConfigError, match="no experts"):
        split_experts(dense, 2, table)


@pytest.mark.full
def test_the_upcycled_default_model_over_ranks_has_its_bits(tmp_path: Path) -> None:
    dense = load_model("smollm2-135m-instruct")
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=4, top_k=2))
    tokens, logits = run_script(script_runner(dense, deterministic=True))
    cases = [[str(tmp_path / "moe"), "bfloat16", True]]
    for size in (2, 3, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        told = run_ranks(size, "tests.support.rank_cases:same_steps", folder, exchange="shm", cases=cases)
        assert np.load(folder / "logits-0.npy").tobytes() == logits.tobytes()
        assert told[0][0]["tokens"] == tokens


def test_what_can_not_be_divided_is_refused(cases: list[list[Any]], tmp_path: Path) -> None:
    config = load_model(cases[0][0]).config
    assert [len(part) for part in expert_slots(config, 4)] == [2, 2, 1, 1]
    with pytest.raises(ConfigError, match="7 ranks are more than the model's 6 experts"):
        expert_slots(config, 7)
    olmoe = load_model(str(tiny_models.save(tiny_moe.olmoe(), tmp_path))).config
    with pytest.raises(ConfigError, match="norms over all heads together"):
        shard_config(olmoe, shards(olmoe, 2)[0])
