"""Beam search over real workers equals transformers', on the default model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pdserve.client import Client, Result
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.tokenizer import Tokenizer, load_bundle_from_gguf
from pdserve.types import FinishReason, Role
from scripts.make_oracle import load_reference
from tests.support.stack import Stack
from tests.support.tokenizer_files import smollm2_gguf

PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea,", "def fib(n):\n")
SEARCHES = ((PROMPTS[0], 2, 1.0), (PROMPTS[1], 4, 0.0), (PROMPTS[2], 8, 2.0), (PROMPTS[0], 8, 1.0))
NEW = 6


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    stack = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, num_pages=128)
    with stack.client() as made:
        yield made
    stack.until_idle()
    stack.stop()


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference()


def searched(client: Client, prompt: str, width: int, **options: Any) -> Result:
    return client.generate(
        prompt, beam_width=width, n=width, max_tokens=NEW, **options
    ).result()  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(load_bundle_from_gguf(smollm2_gguf()))


def oracle(reference: Any, ids: list[int], width: int, penalty: float) -> list[tuple[int, ...]]:
    """transformers' beams, best first, without what fills up those that ended early."""
    row, end = torch.tensor([ids]), reference.generation_config.eos_token_id
    with torch.no_grad():
        rows = reference.generate(
            row, attention_mask=torch.ones_like(row), num_beams=width, num_return_sequences=width,
            do_sample=False, early_stopping=False, max_new_tokens=NEW, length_penalty=penalty,
            pad_token_id=end,
        )  # fmt: skip
    made = [found[len(ids) :].tolist() for found in rows]
    return [tuple(ids[: ids.index(end) + 1] if end in ids else ids) for ids in made]


@pytest.mark.parametrize(("prompt", "width", "penalty"), SEARCHES)
def test_beams_equal_those_of_transformers(
    client: Client, reference: Any, tokenizer: Tokenizer, prompt: str, width: int, penalty: float
) -> None:
    result = searched(client, prompt, width, length_penalty=penalty)
    ids = tokenizer.encode(prompt)
    wanted = oracle(reference, ids, width, penalty)
    assert [c.token_ids for c in result.choices] == wanted
    assert result.usage.prompt_tokens == len(ids)
    assert result.usage.completion_tokens == sum(map(len, wanted))
    assert result.ledger.prefill_computed_tokens + result.ledger.prefill_cached_tokens == len(ids)


def test_beams_come_with_their_text_and_log_probabilities(client: Client) -> None:
    result = searched(client, PROMPTS[0], 2, logprobs=3)
    for choice in result.choices:
        assert b"".join(entry.token for entry in choice.logprobs).decode() == choice.text
        assert [len(entry.top) for entry in choice.logprobs] == [3] * NEW
        assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))
        assert choice.finish_reason is FinishReason.LENGTH
    first, second = (choice.cumulative_logprob for choice in result.choices)
    assert first is not None
    assert second is not None
    assert first >= second


def test_a_stop_token_ends_a_beam(client: Client) -> None:
    plain = searched(client, PROMPTS[0], 2)
    stop = plain.token_ids[2]
    result = searched(client, PROMPTS[0], 2, stop_token_ids=[stop])
    ended = [c for c in result.choices if c.finish_reason is FinishReason.STOP]
    assert ended
    assert all(c.stop_token_id == stop == c.token_ids[-1] for c in ended)


def test_what_would_change_probabilities_is_refused_by_name(client: Client) -> None:
    for name, value in (("temperature", 0.5), ("top_k", 5), ("presence_penalty", 1.0)):
        with pytest.raises(UnsupportedFeature, match=f"^sampling.{name}"):
            searched(client, "x", 2, **{name: value})
    with pytest.raises(UnsupportedFeature, match=r"^stop"):
        searched(client, "x", 2, stop=["."])
    with pytest.raises(InvalidRequest, match=r"^length_penalty"):
        client.generate("x", length_penalty=2.0).result()
    with pytest.raises(InvalidRequest, match=r"^n"):
        client.generate("x", beam_width=2, n=3).result()
