"""Evaluated sequences on two ranks: the bits of one device, however the ranks share the model."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiny_models, tiny_moe
from tests.support.evaluate_cases import run, runner_of
from tests.support.rank_kit import run_ranks


def test_two_ranks_make_of_rows_what_one_device_makes(tmp_path: Path) -> None:
    dense, mixture = tmp_path / "dense", tmp_path / "mixture"
    for folder, model in ((dense, tiny_models.qwen3()), (mixture, tiny_moe.qwen3_moe())):
        folder.mkdir()
        tiny_models.save(model, folder)
    cases = [
        [str(dense), "divided"],
        [str(mixture), "divided"],
        [str(mixture), "rows"],
        [str(mixture), "repeated"],
    ]
    told = run_ranks(2, "tests.support.evaluate_cases:steps", tmp_path, exchange="shm", cases=cases)
    for number, (model, _) in enumerate(cases):
        expected = run(runner_of(model, "divided"))
        assert told[0][number] == expected
        assert [len(made["a"][0]) for _, _, made in expected if "a" in made] == [33, 19]
