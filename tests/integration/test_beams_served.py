"""Beam search over real workers equals transformers', on the default model in float32.

What transformers finds is in a file that scripts/make_beam_oracle.py wrote; `make test-full` finds it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import Client, Result
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.types import FinishReason, Role
from tests.support.stack import Stack

_ORACLE = json.loads((Path(__file__).resolve().parents[1] / "data" / "beams_smollm2.json").read_text())
SEARCHES: list[dict[str, Any]] = _ORACLE["searches"]
PROMPT: str = SEARCHES[0]["prompt"]
NEW: int = _ORACLE["new_tokens"]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    stack = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, num_pages=128)
    with stack.client() as made:
        yield made
    stack.until_idle()
    stack.stop()


def searched(client: Client, prompt: str, width: int, **options: Any) -> Result:
    return client.generate(
        prompt, beam_width=width, n=width, max_tokens=NEW, **options
    ).result()  # fmt: skip


@pytest.mark.parametrize("wanted", SEARCHES, ids=lambda w: f"{w['width']}-{w['penalty']:g}")
def test_beams_equal_those_of_transformers(client: Client, wanted: dict[str, Any]) -> None:
    result = searched(client, wanted["prompt"], wanted["width"], length_penalty=wanted["penalty"])
    assert [list(choice.token_ids) for choice in result.choices] == wanted["beams"]
    num_prompt, usage, ledger = len(wanted["ids"]), result.usage, result.ledger
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, sum(map(len, wanted["beams"])))
    assert ledger.prefill_computed_tokens + ledger.prefill_cached_tokens == num_prompt


@pytest.mark.full
def test_the_oracle_is_what_transformers_finds() -> None:
    from scripts.make_beam_oracle import search_all
    from scripts.make_oracle import load_reference

    assert search_all(load_reference()) == SEARCHES


def test_beams_come_with_their_text_and_log_probabilities(client: Client) -> None:
    result = searched(client, PROMPT, 2, logprobs=3)
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
    plain = searched(client, PROMPT, 2)
    stop = plain.token_ids[2]
    result = searched(client, PROMPT, 2, stop_token_ids=[stop])
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
