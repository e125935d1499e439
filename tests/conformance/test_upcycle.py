"""Upcycled mixtures: the default model's greedy text stays what it was; the files say what was asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pdserve.cli.main import app
from pdserve.errors import ConfigError, ModelError
from pdserve.layers.routers import RouterKind
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.models.upcycle import Upcycling, upcycle
from pdserve.types import SamplingParams
from tests.support import oracle_prompts, tiny_models
from tests.support.engine_driver import EngineDriver

MODEL = "smollm2-135m-instruct"
TEXTS = ["The capital of France is", "def fibonacci(n):\n    "]
NEW_TOKENS = 16


def answers(
    model: LoadedModel, prompts: list[list[int]], **options: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens and their logits, all prompts at once."""
    driver = EngineDriver(model, num_pages=32, chunk_tokens=64, capture_logits=True, **options)
    for i, ids in enumerate(prompts):
        driver.submit(f"s{i}", ids, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
    driver.run()
    return [(driver.tokens[f"s{i}"], torch.stack(driver.logits[f"s{i}"])) for i in range(len(prompts))]


def test_the_default_model_s_text_is_unchanged(tmp_path: Path) -> None:
    """Through the command, in the default dtype: tokens and every logit's bits, at prefill and decode."""
    made = ["moe", "upcycle", MODEL, "-o", str(tmp_path / "moe"), "--experts", "2", "--top-k", "2"]
    result = CliRunner().invoke(app, made)
    assert result.exit_code == 0, result.output
    assert "31/31 done" in result.output
    dense, moe = load_model(MODEL), load_model(str(tmp_path / "moe"))
    prompts = oracle_prompts.encode(moe.tokenizer.tokenizer_json, TEXTS)
    assert prompts == oracle_prompts.encode(dense.tokenizer.tokenizer_json, TEXTS)
    for field in (
        "chat_template",
        "bos_token_id",
        "end_token_ids",
        "special_tokens",
        "add_bos",
        "max_context",
    ):
        assert getattr(moe.tokenizer, field) == getattr(dense.tokenizer, field), field
    for ours, theirs in zip(answers(moe, prompts), answers(dense, prompts), strict=True):
        assert len(ours[0]) == NEW_TOKENS
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])


def tiny(folder: Path, **fields: Any) -> LoadedModel:
    return load_model(str(tiny_models.save(tiny_models.mistral(**fields), folder)), "float32")


def prompts_of_tiny() -> list[list[int]]:
    return [list(range(1, 70)), [5, 9, 200]]


@pytest.mark.parametrize(("experts", "top_k"), [(3, 1), (5, 3), (8, 8)])
def test_any_number_of_experts_gives_the_dense_bits(experts: int, top_k: int, tmp_path: Path) -> None:
    dense = tiny(tmp_path / "dense", sliding_window=23, rope_parameters=tiny_models.YARN)
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=experts, top_k=top_k, seed=3))
    moe = load_model(str(tmp_path / "moe"), "float32")
    assert moe.config.experts is not None
    assert (moe.config.experts.num_experts, moe.config.experts.top_k) == (experts, top_k)
    assert dataclasses.replace(moe.config, architecture="mistral", experts=None) == dense.config
    for ours, theirs in zip(answers(moe, prompts_of_tiny()), answers(dense, prompts_of_tiny()), strict=True):
        assert torch.equal(ours[1], theirs[1])


def test_noise_makes_experts_differ_and_transformers_agrees_on_the_result(tmp_path: Path) -> None:
    dense = tiny(tmp_path / "dense")
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=4, top_k=2, noise=0.3, seed=1))
    upcycle(dense, tmp_path / "again", Upcycling(num_experts=4, top_k=2, noise=0.3, seed=1))
    moe, again = (load_model(str(tmp_path / name), "float32") for name in ("moe", "again"))
    assert moe.digest == again.digest
    experts = moe.weights["model.layers.0.mlp.experts.down_proj"]
    assert not torch.equal(experts[0], experts[1])
    spread = (experts - dense.weights["model.layers.0.mlp.down_proj.weight"]).std()
    assert float(spread) == pytest.approx(0.3 * 0.18, rel=0.1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    prompt = prompts_of_tiny()[0]
    ((tokens, logits),) = answers(moe, [prompt])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[
            0, len(prompt) - 1 :
        ]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_capacity_router_is_written_down_and_used(tmp_path: Path) -> None:
    dense = tiny(tmp_path / "dense")
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=4, top_k=1, seed=6, router=RouterKind.SWITCH))
    moe = load_model(str(tmp_path / "moe"), "float32")
    assert moe.config.experts is not None
    assert moe.config.experts.router is RouterKind.SWITCH
    modes = {path.stat().st_mode for path in (tmp_path / "moe").iterdir()}
    assert len(modes) == 1, "whoever may read one file may read all"
    driver = EngineDriver(moe, num_pages=32)
    driver.submit("s", prompts_of_tiny()[0], SamplingParams(max_tokens=1))
    driver.run()
    load = driver.runner.expert_load
    assert load is not None
    assert not load.balance().isnan().any()
    assert int(load.counts_LX.sum()) < 3 * len(prompts_of_tiny()[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_experts": 0, "top_k": 1}, "experts: must be from 1"),
        ({"num_experts": 2, "top_k": 3}, "top_k: must be from 1"),
        ({"num_experts": 2, "top_k": 1, "noise": -1.0}, "noise: must be from 0"),
    ],
)
def test_impossible_wishes_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Upcycling(**arguments)


def test_what_can_not_be_upcycled_is_refused(tmp_path: Path) -> None:
    made = Upcycling(num_experts=2, top_k=1)
    folder = tiny_models.save(tiny_models.qwen2(), tmp_path / "qwen")
    with pytest.raises(ModelError, match="Only Llama- and Mistral-shaped"):
        upcycle(load_model(str(folder), "float32"), tmp_path / "moe", made)
    dense = tiny(tmp_path / "dense")
    with pytest.raises(ConfigError, match="directory is not empty"):
        upcycle(dense, tmp_path / "qwen", made)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    upcycle(dense, tmp_path / "moe", made)
    with pytest.raises(ModelError, match="Only Llama- and Mistral-shaped"):
        upcycle(load_model(str(tmp_path / "moe"), "float32"), tmp_path / "twice", made)
