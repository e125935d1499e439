"""Beam search as a state machine, against transformers' own over the same tiny model, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pdserve.types import FinishReason, TokenLogprob
from router.beam import BeamSearch
from tests.support import tiny_models

PROMPTS = [[5, 9, 200], [17, 3, 3, 90, 41, 77], list(range(30, 60))]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only waits for more of them
    yield tiny_models.llama()
    torch.set_num_threads(before)


def following(model: Any, rows: list[list[int]], num: int) -> list[tuple[TokenLogprob, ...]]:
    """The likeliest tokens after each row, by the model's own logits."""
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, -1].float()
    values, found = torch.log_softmax(logits, dim=-1).topk(num)
    pairs = zip(found.tolist(), values.tolist(), strict=True)
    return [top(*zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]


def top(*pairs: tuple[int, float]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=token_id, logprob=value) for token_id, value in pairs)


def searched(model: Any, prompt: list[int], **settings: Any) -> BeamSearch:
    search = BeamSearch(**settings)
    while not search.done:
        num = search.num_alternatives
        search.step(following(model, [[*prompt, *beam.token_ids] for beam in search.beams], num))
    return search


def oracle(model: Any, prompt: list[int], width: int, max_tokens: int, **settings: Any) -> list[list[int]]:
    """transformers' beams, best first, without what fills them up."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        rows = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
            do_sample=False, early_stopping=False, max_new_tokens=max_tokens, pad_token_id=-1, **settings,
        )  # fmt: skip
    return [[i for i in row[len(prompt) :].tolist() if i >= 0] for row in rows]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_equal_those_of_transformers(model: Any, width: int, penalty: float) -> None:
    for prompt in PROMPTS:
        # Of two likely tokens one ends a beam, so that beams of unlike lengths are compared.
        ends = [
            following(model, [prompt], 2)[0][1].token_id,
            following(model, [[*prompt, 1]], 1)[0][0].token_id,
        ]
        search = searched(
            model, prompt, width=width, max_tokens=8, end_ids=frozenset(ends), length_penalty=penalty
        )
        wanted = oracle(model, prompt, width, 8, length_penalty=penalty, eos_token_id=ends)
        assert [list(entry.beam.token_ids) for entry in search.ended] == wanted


def test_no_beam_ends_before_min_tokens(model: Any) -> None:
    prompt = PROMPTS[1]
    ends = [token.token_id for token in following(model, [prompt], 2)[0]]
    search = searched(model, prompt, width=4, max_tokens=6, end_ids=frozenset(ends), min_tokens=3)
    wanted = oracle(model, prompt, 4, 6, eos_token_id=ends, min_new_tokens=3)
    assert [list(entry.beam.token_ids) for entry in search.ended] == wanted


def test_a_beam_that_ends_says_why() -> None:
    search = BeamSearch(width=1, max_tokens=2, end_ids=frozenset({9}))
    search.step([top((1, -0.1), (9, -3.0))])
    search.step([top((9, -0.1), (2, -3.0))])
    (ended,) = search.ended
    assert search.done
    assert (ended.finish, ended.beam.token_ids) == (FinishReason.STOP, (1, 9))
    assert ended.score == pytest.approx(-0.1)


def test_an_end_below_the_best_does_not_count() -> None:
    search = BeamSearch(width=2, max_tokens=5, end_ids=frozenset({9}))
    search.step([top((1, -0.1), (2, -0.2), (9, -0.3))])
    assert search.ended == ()
    assert [beam.token_ids for beam in search.beams] == [(1,), (2,)]


def test_the_search_stops_when_nothing_can_be_better() -> None:
    search = BeamSearch(width=1, max_tokens=100, end_ids=frozenset({9}))
    search.step([top((9, -0.1), (1, -2.0))])
    assert search.done
    assert [entry.beam.token_ids for entry in search.ended] == [(9,)]


def test_alternatives_are_kept_with_their_token() -> None:
    search = BeamSearch(width=1, max_tokens=1)
    choices = top((4, -0.5), (5, -1.0))
    search.step([choices])
    (token,) = search.ended[0].beam.tokens
    assert (token.token_id, token.top) == (4, choices)
    assert search.ended[0].finish is FinishReason.LENGTH
