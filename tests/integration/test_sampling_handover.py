"""Everything that sampling can be asked for, on real workers: one stream and one set of log-probabilities,
whoever makes the first token, whatever runs beside it, and however often its pages are taken away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from pdserve.messages import Ended
from pdserve.types import FinishReason, HandoverMode, SamplingParams, TokenLogprob
from tests.support import direct as dx

LENGTH, FIRST, NEW, PAGE, POOL = 31, 12, 20, 16, 18
START = tuple(100 + (7919 + i * 104729) % 40000 for i in range(LENGTH - 2 * FIRST))
PAGES = -(-LENGTH // PAGE)
AT_ONCE = 3
"""So many can be handed over at once beside the pages set aside for prompts."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Alone:
    """A prompt, what is asked of it, and each request's answer when decode computes it by itself, one after
    the other."""

    prompt: tuple[int, ...]
    asked: dict[str, SamplingParams]
    answers: dict[str, Answer]


@pytest.fixture(scope="module")
def fleet() -> Iterator[dx.Direct]:
    made = dx.Direct.start(transports=("shm",), num_pages=POOL)
    yield made
    made.stop()


async def run(
    fleet: dx.Direct, prompt: tuple[int, ...], sampling: SamplingParams, mode: HandoverMode, forced: int = 0
) -> tuple[Answer, Ended]:
    """forced: so many tokens at the prompt's end were made by an earlier try."""
    ask = fleet.ask(
        prompt, num_forced=forced, sampling=sampling, mode=mode, use_prefix_cache=False, deadline_s=300.0
    )
    call, ended = await dx.stream(ask)
    return Answer(call.tokens, call.logprobs, ended.finish), ended


def features(prompt: tuple[int, ...], plain: list[int]) -> dict[str, SamplingParams]:
    """plain: the greedy answer, some of which is forbidden here."""
    base = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=3)
    drawn = replace(base, temperature=0.9, seed=2**63 + 5)
    bad_words = ((prompt[-1], plain[0]), (plain[1],), (plain[2], plain[3]))
    each: dict[str, dict[str, Any]] = {
        "repetition": {"repetition_penalty": 1.6},
        "presence and frequency": {"presence_penalty": 2.0, "frequency_penalty": 1.5},
        "bias": {"logit_bias": tuple(sorted({plain[0]: -100.0, plain[1]: 4.0, prompt[3]: 7.5}.items()))},
        "bad words": {"bad_words": bad_words},
        "min tokens": {"stop_token_ids": (plain[0], plain[-1]), "min_tokens": 5},
    }
    drawn_each: dict[str, dict[str, Any]] = {
        "filters": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
        "typical": {"typical_p": 0.8},
        "penalties": each["repetition"] | each["presence and frequency"],
        "all": {"typical_p": 0.95, "top_k": 200} | {k: v for one in each.values() for k, v in one.items()},
    }
    return (
        {"plain": base}
        | {name: replace(base, **fields) for name, fields in each.items()}
        | {f"{name}, drawn": replace(drawn, **fields) for name, fields in drawn_each.items()}
    )


async def one_by_one(fleet: dx.Direct) -> Alone:
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True)
    first, _ = await run(fleet, START, replace(greedy, max_tokens=FIRST), HandoverMode.LOCAL)
    prompt = (*START, *first.tokens, *first.tokens)  # it will repeat itself, so that penalties show
    plain, _ = await run(fleet, prompt, greedy, HandoverMode.LOCAL)
    asked = features(prompt, plain.tokens)
    answers = {name: (await run(fleet, prompt, s, HandoverMode.LOCAL))[0] for name, s in asked.items()}
    return Alone(prompt, asked, answers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(fleet: dx.Direct) -> Alone:
    return await one_by_one(fleet)


async def test_what_is_asked_for_shows(alone: Alone) -> None:
    plain = alone.answers["plain"].tokens
    for name, answer in alone.answers.items():
        assert (answer.tokens == plain) == (name == "plain"), name
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            assert logprob is not None
            assert (logprob.token_id, len(logprob.top)) == (token, 3)
            assert name != "plain" or replace(logprob, top=()) == logprob.top[0]
    assert alone.answers["bad words"].tokens[0] != plain[0]
    assert plain[1] not in alone.answers["bad words"].tokens
    assert len(alone.answers["min tokens"].tokens) >= 6, "the stop token would have been the first"


async def test_handed_over_beside_others(fleet: dx.Direct, alone: Alone) -> None:
    """Prefill makes the first token, decode the others, for several requests at the same time."""
    names = list(alone.asked)
    for begin in range(0, len(names), AT_ONCE):
        part = names[begin : begin + AT_ONCE]
        made = await asyncio.gather(
            *(run(fleet, alone.prompt, alone.asked[n], HandoverMode.DISAGGREGATED) for n in part)
        )
        for name, (answer, ended) in zip(part, made, strict=True):
            ledger = ended.ledger
            assert (ledger.decode_computed_prompt_tokens, ledger.transfer.pages) == (0, PAGES)
            assert answer == alone.answers[name], name


async def test_preempted(fleet: dx.Direct, alone: Alone) -> None:
    """All at once: their growth does not fit into the pool, and what was taken is computed again."""
    made = await asyncio.gather(
        *(run(fleet, alone.prompt, s, HandoverMode.LOCAL) for s in alone.asked.values())
    )
    assert sum(ended.ledger.num_retractions for _, ended in made) > 0
    for name, (answer, _) in zip(alone.asked, made, strict=True):
        assert answer == alone.answers[name], name


@pytest.mark.parametrize("forced", [1, 7])
async def test_tried_again_after_some_tokens(fleet: dx.Direct, alone: Alone, forced: int) -> None:
    """What was delivered is neither prompt nor forgotten: penalties and min_tokens count on."""
    names = ("all, drawn", "repetition", "presence and frequency")
    made = await asyncio.gather(
        *(
            run(
                fleet, (*alone.prompt, *alone.answers[name].tokens[:forced]), alone.asked[name],
                HandoverMode.DISAGGREGATED, forced,
            )
            for name in names
        )
    )  # fmt: skip
    for name, (answer, _) in zip(names, made, strict=True):
        whole = alone.answers[name]
        assert answer == Answer(whole.tokens[forced:], whole.logprobs[forced:], whole.finish), name
