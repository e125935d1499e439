"""The default model's log-probabilities and vectors against transformers, in float32, on a real text."""

from __future__ import annotations

import pytest
import torch

from pdserve.messages import EvaluateParams
from pdserve.models.loader import load_model
from pdserve.types import Pooling
from scripts.make_oracle import MODEL, load_reference
from tests.support import oracle_prompts
from tests.support.engine_driver import EngineDriver

TOLERANCE = 1e-4
LENGTH = 160


def test_figures_equal_transformers() -> None:
    model = load_model(MODEL, "float32")
    texts = [prompt.text for prompt in oracle_prompts.prompts()]
    ids = max(oracle_prompts.encode(model.tokenizer.tokenizer_json, texts), key=len)[:LENGTH]
    driver = EngineDriver(model, num_pages=64, chunk_tokens=128)
    driver.evaluate("logprobs", ids, EvaluateParams(num_top=5))
    for pooling in Pooling:
        driver.evaluate(pooling, ids, EvaluateParams(pooling=pooling))
    driver.run()

    reference = load_reference()
    with torch.inference_mode():
        states = reference.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        rows = torch.log_softmax(reference.lm_head(states).double(), dim=-1)
    found = driver.evaluated["logprobs"].logprobs
    assert [each.token_id for each in found] == ids[1:]
    expected = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert [each.logprob for each in found] == pytest.approx(expected.tolist(), abs=TOLERANCE)
    best = rows[:-1].topk(5).values
    assert [[top.logprob for top in each.top] for each in found] == [
        pytest.approx(row, abs=TOLERANCE) for row in best.tolist()
    ]
    for pooling, theirs in ((Pooling.MEAN, states.mean(0)), (Pooling.LAST, states[-1])):
        ours = torch.tensor(driver.evaluated[pooling].hidden_sum)
        ours = ours / len(ids) if pooling is Pooling.MEAN else ours
        assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()
