"""The same steps on 1, 2, 3 and 4 ranks: deterministic ones have the same bits, others stay within a bound.

The oracle is the single-device runner. Ranks are real processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ConfigError
from pdserve.models.loader import load_model
from pdserve.parallel.shards import shards
from tests.support import tiny_models
from tests.support.parallel_script import run_script, script_runner
from tests.support.rank_kit import run_ranks

SMOL_SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "smollm2": lambda: tiny_models.llama(**SMOL_SHAPE),
    "llama-biases": lambda: tiny_models.llama(attention_bias=True, mlp_bias=True),
    "qwen3": lambda: tiny_models.qwen3(head_dim=32),
}
"""The default model's widths and heads with fewer layers; biases on every linear; norms on heads."""
BOUND = {"float32": 2.0**-17, "bfloat16": 2.0**-6}
"""Root mean square of the difference over that of the logits, where products are added over ranks: 128 and 4
roundings of the dtype."""
MODES = [("float32", True), ("bfloat16", True), ("float32", False), ("bfloat16", False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_models.save(make(), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def cases(folders: dict[str, Path]) -> list[list[Any]]:
    return [[str(folder), dtype, mode] for folder in folders.values() for dtype, mode in MODES]


@pytest.fixture(scope="module")
def alone(cases: list[list[Any]]) -> list[tuple[Any, np.ndarray]]:
    return [run_script(script_runner(load_model(m, dtype), deterministic=mode)) for m, dtype, mode in cases]


@pytest.mark.parametrize(("size", "exchange"), [(2, "shm"), (3, "shm"), (4, "shm"), (3, "gloo")])
def test_ranks_compute_what_one_device_computes(
    size: int, exchange: str, cases: list[list[Any]], alone: list[tuple[Any, np.ndarray]], tmp_path: Path
) -> None:
    told = run_ranks(size, "tests.support.rank_cases:same_steps", tmp_path, exchange=exchange, cases=cases)
    for number, ((_, dtype, deterministic), (tokens, logits)) in enumerate(zip(cases, alone, strict=True)):
        found = np.load(tmp_path / f"logits-{number}.npy")
        if deterministic:
            assert found.tobytes() == logits.tobytes()
            assert told[0][number]["tokens"] == tokens
        else:
            assert _distance(found, logits) <= BOUND[dtype]
        assert all(not any(step) for rank in told[1:] for step in rank[number]["tokens"])
        assert len({rank[number]["numerics"] for rank in told}) == 1


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the difference, relative to the wanted values'."""
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_of_the_default_model_have_its_bits(size: int, tmp_path: Path) -> None:
    tokens, logits = run_script(script_runner(load_model("smollm2-135m-instruct"), deterministic=True))
    cases = [["smollm2-135m-instruct", "bfloat16", True]]
    told = run_ranks(size, "tests.support.rank_cases:same_steps", tmp_path, exchange="shm", cases=cases)
    assert np.load(tmp_path / "logits-0.npy").tobytes() == logits.tobytes()
    assert told[0][0]["tokens"] == tokens


def test_numerics_name_the_ranks_only_where_they_matter(folders: dict[str, Path], tmp_path: Path) -> None:
    cases = [[str(folders["qwen3"]), "float32", mode] for mode in (True, False)]
    one = [script_runner(load_model(m, d), deterministic=mode).numerics_id for m, d, mode in cases]
    two = run_ranks(2, "tests.support.rank_cases:same_steps", tmp_path, exchange="shm", cases=cases)[0]
    assert two[0]["numerics"] == one[0]
    assert two[1]["numerics"] != one[1]


def test_more_ranks_than_heads_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="5 ranks are more than the model's 4 query heads"):
        shards(load_model(str(folders["qwen3"])).config, 5)


def test_the_models_here_have_the_shapes_they_should(folders: dict[str, Path]) -> None:
    config = load_model(str(folders["smollm2"])).config
    assert (config.num_heads, config.num_kv_heads, config.hidden_size) == (9, 3, 576)
