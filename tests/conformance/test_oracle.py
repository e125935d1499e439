"""The default model on real prompts: token for token what transformers answers, in float32.

All answers are checked against a file that scripts/make_oracle.py wrote from transformers; a few of them are
made again by transformers here, all of them in `make test-full`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.types import SamplingParams
from scripts.make_oracle import MODEL, answer, load_reference
from tests.support import oracle_prompts
from tests.support.engine_driver import EngineDriver, generate

LIVE = ("381", "85", "117", "124")
"""Prompts that transformers answers again in every run; short ones, as it decodes slowly."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(MODEL, "float32")


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> dict[str, list[int]]:
    texts = oracle_prompts.prompts()
    ids = oracle_prompts.encode(model.tokenizer.tokenizer_json, [p.text for p in texts])
    return {p.name: i for p, i in zip(texts, ids, strict=True)}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return {a["name"]: a for a in json.loads(oracle_prompts.ORACLE.read_text())["answers"]}


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference()


def test_the_oracle_covers_what_it_should(
    prompts: dict[str, list[int]], answers: dict[str, dict[str, Any]]
) -> None:
    lengths = [len(ids) for ids in prompts.values()]
    assert len(lengths) >= 24
    assert min(lengths) <= 10
    assert max(lengths) > 3000
    assert {name: a["num_tokens"] for name, a in answers.items()} == {n: len(i) for n, i in prompts.items()}
    assert all(len(a["tokens"]) == oracle_prompts.NEW_TOKENS for a in answers.values())


def test_the_committed_prompts_are_the_data_set_s() -> None:
    whole = oracle_prompts.read_questions(oracle_prompts.source_path())
    for question, text in oracle_prompts.read_questions(oracle_prompts.SUBSET).items():
        assert whole[question] == text


def test_greedy_tokens_equal_the_oracle_side_by_side(
    model: LoadedModel, prompts: dict[str, list[int]], answers: dict[str, dict[str, Any]]
) -> None:
    """All prompts at once: chunked prefill beside decode, pages of 16, prefix cache on."""
    tokens = generate(EngineDriver(model, num_pages=1200), prompts, oracle_prompts.NEW_TOKENS)
    assert tokens == {name: a["tokens"] for name, a in answers.items()}


def test_weights_equal_transformers(model: LoadedModel, reference: Any) -> None:
    expected = reference.state_dict()
    assert set(model.weights) == set(expected) - {"lm_head.weight"}
    for name, weight in model.weights.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("name", LIVE)
def test_transformers_still_answers_so(
    name: str, prompts: dict[str, list[int]], answers: dict[str, dict[str, Any]], reference: Any
) -> None:
    assert answer(reference, prompts[name])[0] == answers[name]["tokens"]


@pytest.mark.full
def test_transformers_still_answers_all_so(
    prompts: dict[str, list[int]], answers: dict[str, dict[str, Any]], reference: Any
) -> None:
    for name, ids in prompts.items():
        assert answer(reference, ids)[0] == answers[name]["tokens"], name


def test_logits_are_close_to_transformers(
    model: LoadedModel, prompts: dict[str, list[int]], reference: Any
) -> None:
    driver = EngineDriver(model, num_pages=1200, chunk_tokens=128, capture_logits=True)
    names = ("381", "134", "503")
    for name in names:
        driver.submit(name, prompts[name], SamplingParams(max_tokens=1))
    driver.run()
    for name in names:
        with torch.inference_mode():
            expected = reference(torch.tensor([prompts[name]]), logits_to_keep=1).logits[0, 0]
        assert (driver.logits[name][0] - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_bfloat16_stays_close_to_float32(model: LoadedModel, prompts: dict[str, list[int]]) -> None:
    """The stated bound of the serving default: KL to float32 under 0.005 nats on average, 0.05 at most."""
    chosen = {name: ids for name, ids in prompts.items() if len(ids) < 300}
    rows = []
    for loaded in (model, load_model(MODEL, "bfloat16")):
        driver = EngineDriver(loaded, num_pages=200, capture_logits=True)
        generate(driver, chosen, 1)
        rows.append(torch.stack([driver.logits[name][0] for name in chosen]).log_softmax(-1))
    exact, rounded = rows
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert len(chosen) >= 15
    assert divergence.mean() < 0.005
    assert divergence.max() < 0.05
