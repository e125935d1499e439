"""The default model's logits, what requests make of them, and log-probabilities: those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.processors import processed
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import uniform
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.sched.plan import History
from pdserve.types import SamplingParams
from scripts.make_oracle import MODEL, load_reference
from tests.support import oracle_prompts, reference_sampling
from tests.support.engine_driver import EngineDriver

NAMES = ("381", "85", "117")
NEW = 8
TOP = 20
BASE = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=TOP)
EQUAL = {"rel": 1e-4, "abs": 1e-4}
"""Log-probabilities, of logits that two programs computed."""
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(MODEL, "float32")


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> dict[str, list[int]]:
    texts = [p for p in oracle_prompts.prompts() if p.name in NAMES]
    ids = oracle_prompts.encode(model.tokenizer.tokenizer_json, [p.text for p in texts])
    return {p.name: i for p, i in zip(texts, ids, strict=True)}


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference()


def asked(ids: list[int], plain: list[int], ends: tuple[int, ...]) -> dict[str, SamplingParams]:
    """plain: the greedy answer. Transformers lets nobody forbid an end token, and we do."""
    plain = [token for token in plain if token not in ends]
    bad_words = ((plain[0],), (ids[-1], plain[1]), (plain[-3], plain[-2]), (plain[-1],))
    each: dict[str, dict[str, Any]] = {
        "repetition": {"repetition_penalty": 1.4},
        "bias": {"logit_bias": tuple(sorted({plain[0]: -5.0, plain[2]: 3.0, ids[0]: 6.0}.items()))},
        "bad words": {"bad_words": bad_words},
        "min tokens": {"min_tokens": 6, "logit_bias": ((ends[0], 60.0),), "ignore_eos": False},
    }
    return {name: replace(BASE, **fields) for name, fields in each.items()}


Drive = Callable[[dict[str, tuple[list[int], SamplingParams]]], EngineDriver]


@pytest.fixture(scope="module")
def drive(model: LoadedModel) -> Drive:
    """All requests at once, on one engine."""
    runner = EngineDriver(model, num_pages=400, capture_logits=True).runner
    return partial(drive_on, model, runner)


def drive_on(
    model: LoadedModel, runner: ModelRunner, requests: dict[str, tuple[list[int], SamplingParams]]
) -> EngineDriver:
    driver = EngineDriver(model, runner=runner)
    for name, (ids, params) in requests.items():
        driver.submit(name, ids, params)
    driver.run()
    assert not driver.failed
    return driver


def their_logits(reference: Any, ids: list[int], made: list[int]) -> torch.Tensor:
    """Transformers' own logits [tokens, V] at the place of each token that was made."""
    with torch.inference_mode():
        out = reference(torch.tensor([[*ids, *made]]), logits_to_keep=len(made) + 1)
    return out.logits[0, :-1].clone()


def test_answers_scores_and_logprobs_are_those_of_transformers(
    model: LoadedModel, drive: Drive, prompts: dict[str, list[int]], reference: Any
) -> None:
    ends = model.limits.end_token_ids
    plain = drive({name: (ids, BASE) for name, ids in prompts.items()})
    requests = {
        f"{name} {feature}": (ids, params)
        for name, ids in prompts.items()
        for feature, params in asked(ids, plain.tokens[name], ends).items()
    }
    ours = drive(requests)
    others = [name for name in requests if ours.tokens[name] != plain.tokens[name.split()[0]]]
    assert len(others) >= 2 * len(requests) // 3
    for name, (ids, params) in requests.items():
        made = ours.tokens[name]
        logits = their_logits(reference, ids, made)
        for index, token in enumerate(made):
            history = History(token_ids=(*ids, *made[:index]), num_prompt=len(ids))
            row = ours.logits[name][index].numpy()
            want = reference_sampling.processed(row, params, history, ends)[0].numpy()
            mine = processed(row, params, history, end_token_ids=ends)
            np.testing.assert_allclose(mine, want, **CLOSE)
            theirs = reference_sampling.processed(logits[index].numpy(), params, history, ends)[0]
            assert token == theirs.argmax(), name
        compare_logprobs(ours.logprobs[name], logits.double().log_softmax(-1), made)


def compare_logprobs(ours: list[Any], want: torch.Tensor, tokens: list[int]) -> None:
    """want: [tokens, V]."""
    assert len(ours) == len(tokens)
    for index, (logprob, token) in enumerate(zip(ours, tokens, strict=True)):
        best = want[index].topk(TOP)
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(float(want[index, token]), **EQUAL)
        assert [each.logprob for each in logprob.top] == pytest.approx(best.values.tolist(), **EQUAL)
        for each in logprob.top:
            assert each.logprob == pytest.approx(float(want[index, each.token_id]), **EQUAL)


def test_the_order_of_processing_is_that_of_transformers_generate(
    model: LoadedModel, drive: Drive, prompts: dict[str, list[int]], reference: Any
) -> None:
    ids, ends = prompts[NAMES[0]], model.limits.end_token_ids
    features = asked(ids, drive({"plain": (ids, BASE)}).tokens["plain"], ends)
    params = replace(
        BASE, max_tokens=5, repetition_penalty=1.4, min_tokens=4, ignore_eos=False,
        bad_words=features["bad words"].bad_words,
        logit_bias=tuple(sorted({*features["bias"].logit_bias, (ends[0], 60.0)})),
    )  # fmt: skip
    with torch.inference_mode():
        theirs = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=params.max_tokens, do_sample=False, pad_token_id=0, eos_token_id=list(ends),
            repetition_penalty=params.repetition_penalty, min_new_tokens=params.min_tokens,
            sequence_bias=[[[token], bias] for token, bias in params.logit_bias],
            bad_words_ids=[list(word) for word in params.bad_words],
        )  # fmt: skip
    made = drive({"all": (ids, params)}).tokens["all"]
    assert made == theirs[0, len(ids) :].tolist()
    assert made[params.min_tokens] == ends[0], "as soon as it may end, it does"


def test_drawn_tokens_are_possible_and_follow_their_distribution(
    drive: Drive, prompts: dict[str, list[int]]
) -> None:
    """Over real logits: each drawn token is where the running sum of transformers' probabilities passes the
    number that belongs to its seed and index, by id."""
    drawn = replace(BASE, temperature=0.8, min_p=0.02, typical_p=0.95, repetition_penalty=1.2, logprobs=None)
    requests = {
        f"{name} {seed}": (ids, replace(drawn, seed=seed))
        for name, ids in prompts.items()
        for seed in range(2)
    }
    ours = drive(requests)
    for name, (ids, params) in requests.items():
        for index, (row, token) in enumerate(zip(ours.logits[name], ours.tokens[name], strict=True)):
            history = History(token_ids=(*ids, *ours.tokens[name][:index]), num_prompt=len(ids))
            sums = reference_sampling.probabilities(row.numpy(), params, history).cumsum()
            at = uniform(params.seed, index)
            assert sums[token - 1] - 1e-6 <= at <= sums[token] + 1e-6, name
