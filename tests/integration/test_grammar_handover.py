"""One request with a grammar: disaggregated, on decode alone, tried again, preempted. One stream of tokens.

Real workers, the default model, deterministic float32, temperature 1. No sampling state is sent: each place
makes its own matcher from the tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kvcache.pool import KVPool
from pdserve.messages import Refusal, Refused
from pdserve.models.loader import load_model
from pdserve.sched.plan import Preempted
from pdserve.structured.masks import GrammarMasks
from pdserve.types import FinishReason, Grammar, GrammarKind, HandoverMode, SamplingParams
from tests.support.direct import MODEL, Direct, generate, prefill, reserve
from tests.support.engine_driver import EngineDriver
from tests.support.grammar_kit import compiled, default_tokenizer

CITY = Grammar(
    kind=GrammarKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 4},
                "kind": {"enum": ["harbour", "capital", "village"]},
            },
            "required": ["city", "sizes", "kind"],
            "additionalProperties": False,
        }
    ),
)
DATES = Grammar(kind=GrammarKind.REGEX, text=r"(19|20)\d{2}-(0[1-9]|1[0-2])-[0-3]\d(, (19|20)\d{2}){2,6}")
PROMPT = tuple(default_tokenizer().encode("Describe a city of your choice as JSON, in one line:\n"))
CASES = [(CITY, seed) for seed in (1, 2)] + [(DATES, seed) for seed in (3, 4)]


def _sampling(grammar: Grammar, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=60, temperature=1.0, seed=seed, grammar=grammar)


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    made = Direct.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def streams(direct: Direct) -> dict[tuple[Grammar, int], list[int]]:
    """Each case disaggregated: the first token from the prefill worker."""
    return {case: _run(lambda case=case: _served(direct, *case)) for case in CASES}


def _run(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(make())


async def _served(direct: Direct, grammar: Grammar, seed: int, **changes: Any) -> list[int]:
    ask = direct.ask(PROMPT + changes.pop("forced", ()), sampling=_sampling(grammar, seed), **changes)
    tokens, ended = await generate(ask)
    assert ended.finish in (FinishReason.STOP, FinishReason.LENGTH), ended
    await direct.until_idle()
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_an_answer_conforms_and_is_the_same_on_one_worker(
    direct: Direct, streams: dict[Any, list[int]], case: tuple[Grammar, int]
) -> None:
    tokens = streams[case]
    text = default_tokenizer().decode(tokens)
    if tokens[-1] == default_tokenizer().bundle.end_token_ids[0]:
        if case[0] is DATES:
            assert re.fullmatch(DATES.text, text)
        else:
            assert set(json.loads(text)) == {"city", "sizes", "kind"}
    alone = _run(lambda: _served(direct, *case, mode=HandoverMode.LOCAL))
    assert alone == tokens


def test_some_answer_ends_by_itself(streams: dict[Any, list[int]]) -> None:
    (end,) = default_tokenizer().bundle.end_token_ids
    assert any(tokens[-1] == end for tokens in streams.values())


@pytest.mark.parametrize("mode", [HandoverMode.DISAGGREGATED, HandoverMode.LOCAL])
def test_a_second_try_goes_on_from_the_tokens_sent(
    direct: Direct, streams: dict[Any, list[int]], mode: HandoverMode
) -> None:
    tokens = streams[CASES[0]]
    forced = tuple(tokens[: len(tokens) // 2])

    rest = _run(lambda: _served(direct, *CASES[0], forced=forced, num_forced=len(forced), mode=mode))
    assert [*forced, *rest] == tokens


def test_a_preempted_sequence_goes_on_in_its_grammar(streams: dict[Any, list[int]]) -> None:
    model = load_model(MODEL, "float32")
    masks = GrammarMasks(model.limits.vocab_size)
    pool = KVPool.create(page_layout(model.config, page_size=16, dtype="float32"), 10, pool_id=7)
    driver = EngineDriver(model, runner=ModelRunner(model, pool, deterministic=True, masks=masks))
    with ExitStack() as pins:
        for grammar in (CITY, DATES):
            pins.enter_context(masks.pinned(grammar, compiled(grammar.kind, grammar.text)))
        driver.submit("old", PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        for case in CASES[:2]:
            driver.submit(str(case[1]), PROMPT, _sampling(*case))
        driver.run()
    assert not driver.failed
    assert any(isinstance(event, Preempted) for event in driver.events)
    for case in CASES[:2]:
        assert driver.tokens[str(case[1])] == streams[case]


def test_a_grammar_that_a_worker_can_not_compile_is_refused_by_it(direct: Direct) -> None:
    bad = Grammar(kind=GrammarKind.LARK, text="start: nothing")

    async def both() -> tuple[object, object]:
        ask = direct.ask(PROMPT, sampling=_sampling(bad, 1))
        half, call = prefill(ask), reserve(ask)
        answers = await half, await call.next()
        await call.close()
        return answers

    for answer in _run(both):
        assert isinstance(answer, Refused)
        assert answer.reason is Refusal.INCOMPATIBLE
        assert "sampling.grammar" in answer.detail
    _run(direct.until_idle)
