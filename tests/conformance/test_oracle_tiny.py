"""Every architecture, attention shape and RoPE scaling against transformers: tiny random weights, float32.

The runner is driven by the real scheduler and page manager, in chunks, over pages, with neighbours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pdserve.models.loader import load_model
from pdserve.types import SamplingParams
from tests.support import tiny_models
from tests.support.engine_driver import EngineDriver

NEW_TOKENS = 24
PROMPT_LENGTHS = (5, 61, 150)


def prompts(vocab: int) -> dict[str, list[int]]:
    """Random prompts, the longest of them far over every window and chunk."""
    generator = torch.Generator().manual_seed(11)
    return {f"p{n}": torch.randint(0, vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS}


def drive(directory: Path, **options: Any) -> EngineDriver:
    model = load_model(str(directory), "float32")
    driver = EngineDriver(model, num_pages=64, chunk_tokens=32, capture_logits=True, **options)
    for seq_id, token_ids in prompts(model.config.vocab_size).items():
        driver.submit(seq_id, token_ids, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    driver.run()
    return driver


def reference_logits(model: PreTrainedModel, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """Logits [generated, V] at the rows that the generated tokens were sampled from, in one plain pass."""
    with torch.inference_mode():
        out = model(torch.tensor([prompt + generated[:-1]]), use_cache=False)
    return out.logits[0, len(prompt) - 1 :]


def assert_agrees(model: PreTrainedModel, driver: EngineDriver) -> None:
    for seq_id, prompt in prompts(tiny_models.VOCAB).items():
        expected = reference_logits(model, prompt, driver.tokens[seq_id])
        ours = torch.stack(driver.logits[seq_id])
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert driver.tokens[seq_id] == expected.argmax(dim=-1).tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("name", tiny_models.VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_models.VARIANTS[name]()
    driver = drive(tiny_models.save(model, tmp_path))
    assert_agrees(model, driver)


def test_sharded_checkpoint_equals_transformers(tmp_path: Path) -> None:
    model = tiny_models.VARIANTS["qwen3"]()
    tiny_models.save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_agrees(model, drive(tmp_path, page_size=32))


def test_dynamic_rope_beyond_the_trained_length_is_a_token_by_token_decode(tmp_path: Path) -> None:
    """Past the original length each row has the base of a sequence that ends there: transformers' decode."""
    model = tiny_models.llama(
        max_position_embeddings=48, rope_parameters=tiny_models.scaled("dynamic", factor=4.0)
    )
    loaded = load_model(str(tiny_models.save(model, tmp_path)), "float32")
    assert loaded.limits.max_context == 4 * 48
    prompt = prompts(tiny_models.VOCAB)["p150"]
    driver = EngineDriver(loaded, num_pages=16, chunk_tokens=32, capture_logits=True)
    driver.submit("s", prompt, SamplingParams(max_tokens=1))
    driver.run()
    cache = None
    with torch.inference_mode():
        for token in prompt:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
    expected = out.logits[0, -1]
    assert (driver.logits["s"][0] - expected).abs().max() <= 1e-4 * expected.abs().max()
