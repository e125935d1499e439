"""Log-probabilities and hidden states of evaluated sequences against transformers, over chunks and pages.

The runner is driven by the real scheduler and page manager, with neighbours that generate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pdserve.engine.logprobs import token_logprob
from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kernels.embedding import TokenTable
from pdserve.kvcache.pool import KVPool
from pdserve.messages import EvaluateParams
from pdserve.models.loader import load_model
from pdserve.types import Pooling, SamplingParams
from tests.support import tiny_models, tiny_moe
from tests.support.engine_driver import EngineDriver

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": tiny_models.qwen3,  # layers in one call
    "mixtral": tiny_moe.mixtral,
    "deepseek": tiny_moe.deepseek_v3,
}
LOGPROBS = EvaluateParams(num_top=3)
MEAN, LAST = EvaluateParams(pooling=Pooling.MEAN), EvaluateParams(pooling=Pooling.LAST)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=MODELS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    model = MODELS[request.param]()
    return model, tiny_models.save(model, tmp_path_factory.mktemp("tiny"))


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_models.VOCAB, (length,), generator=generator).tolist()


def driver_of(folder: Path, chunk_tokens: int = 32) -> EngineDriver:
    return EngineDriver(load_model(str(folder), "float32"), num_pages=64, chunk_tokens=chunk_tokens)


def test_figures_equal_transformers(made: tuple[PreTrainedModel, Path]) -> None:
    model, folder = made
    driver = driver_of(folder)
    texts = {"a": tokens(101, 1), "b": tokens(2, 2), "c": tokens(64, 3)}
    driver.submit("neighbour", tokens(40, 9), SamplingParams(max_tokens=12, ignore_eos=True))
    for name, text in texts.items():
        for params in (LOGPROBS, MEAN, LAST):
            driver.evaluate(f"{name} {params.pooling}", text, params)
    driver.run()
    assert not driver.failed
    assert len(driver.tokens["neighbour"]) == 12
    for name, text in texts.items():
        with torch.inference_mode():
            base = model.model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
            expected = torch.log_softmax(model.lm_head(base).double(), dim=-1)
        found = driver.evaluated[f"{name} None"].logprobs
        assert [each.token_id for each in found] == text[1:]
        for row, each in enumerate(found):
            assert abs(each.logprob - expected[row, each.token_id]) <= TOLERANCE
            values, ids = expected[row].topk(3)
            assert [top.token_id for top in each.top] == ids.tolist()
            assert [top.logprob for top in each.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
        mean = torch.tensor(driver.evaluated[f"{name} mean"].hidden_sum) / len(text)
        last = torch.tensor(driver.evaluated[f"{name} last"].hidden_sum)
        for ours, theirs in ((mean, base.mean(0)), (last, base[-1])):
            assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()


def test_figures_do_not_depend_on_chunks_cache_or_neighbours(
    made: tuple[PreTrainedModel, Path],
) -> None:
    """Bit for bit; and of the prompt's rows only those that are asked for are computed again."""
    _, folder = made
    text = tokens(101, 1)
    alone = driver_of(folder, chunk_tokens=512)
    crowd = driver_of(folder, chunk_tokens=16)
    for driver in (alone, crowd):
        driver.evaluate("all", text, LOGPROBS)
        driver.run()
    crowd.submit("neighbour", tokens(40, 9), SamplingParams(max_tokens=12, ignore_eos=True))
    crowd.evaluate("rest", text, EvaluateParams(num_top=3, from_index=70))
    crowd.evaluate("last", text, LAST)
    alone.evaluate("last", text, LAST)
    crowd.run()
    alone.run()
    assert crowd.evaluated["all"] == alone.evaluated["all"]
    assert crowd.evaluated["rest"].logprobs == alone.evaluated["all"].logprobs[69:]
    assert crowd.evaluated["last"] == alone.evaluated["last"]
    assert crowd.hits == {"neighbour": 0, "all": 0, "rest": 64, "last": 96}
    assert crowd.manager.idle


def test_a_row_that_is_no_number_fails_its_sequence_alone(tmp_path: Path) -> None:
    driver = driver_of(tiny_models.save(tiny_models.qwen3(), tmp_path))
    table = driver.runner.decoder.embedding
    assert isinstance(table, TokenTable)
    table.weight_VE[7] = float("nan")
    driver.evaluate("bad", [1, 7, 2], LOGPROBS)
    driver.evaluate("worse", [7], MEAN)
    driver.evaluate("good", [1, 2, 3], LOGPROBS)
    driver.run()
    assert set(driver.failed) == {"bad", "worse"}
    assert len(driver.evaluated["good"].logprobs) == 2


@pytest.mark.parametrize("weights", ["exact", "w8a8"])
@pytest.mark.parametrize("pages", ["bfloat16", "int8"])
def test_rows_have_the_bits_that_tokens_are_sampled_from(weights: str, pages: str, tmp_path: Path) -> None:
    """Those are made by other code where layers are one call."""
    model = load_model(str(tiny_models.save(tiny_models.qwen3(), tmp_path)), "bfloat16")
    layout = page_layout(model.config, page_size=16, dtype=pages)
    runner = ModelRunner(
        model, KVPool.create(layout, 64, pool_id=7), deterministic=True, capture_logits=True, weights=weights
    )
    text = tokens(70, 4)
    driver = EngineDriver(model, runner=runner, chunk_tokens=32)
    driver.submit("sampled", text[:60], SamplingParams(max_tokens=1, ignore_eos=True))
    driver.evaluate("evaluated", text, LOGPROBS)
    driver.run()
    (row_V,) = driver.logits["sampled"]
    assert driver.evaluated["evaluated"].logprobs[59] == token_logprob(row_V.numpy(), text[60], 3)
