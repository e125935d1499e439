"""Grammars through a router: answers of the default model conform, hostile ones cost their own request only.

A router, a prefill and a decode worker as processes; every prompt is handed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pdserve.client import GenerateOptions, Grammar, GrammarKind, Result
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.types import MAX_GRAMMAR_BYTES, FinishReason, Role
from tests.support.stack import Stack

PROMPT = "Write about a city near the sea. Answer:\n"
PLAIN: GenerateOptions = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 30_000_000},
        "sea": {"anyOf": [{"enum": ["Baltic", "North"]}, {"type": "null"}]},
    },
    "required": ["city", "people", "sea"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack.start({Role.PREFILL: 1, Role.DECODE: 1})
    yield made
    made.stop()


def _answer(stack: Stack, seed: int, **form: Any) -> Result:
    options: GenerateOptions = {"max_tokens": 80, "temperature": 1.0, "seed": seed, **form}  # type: ignore[typeddict-item]
    with stack.client() as client:
        result = client.generate(PROMPT, **options).result()
    assert result.ledger.decode_computed_prompt_tokens == 0
    return result


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_to_a_schema_validate(stack: Stack, seed: int) -> None:
    result = _answer(stack, seed, json_schema=CITY)
    if result.finish_reason is FinishReason.STOP:
        Draft202012Validator(CITY).validate(json.loads(result.text))


def test_answers_of_the_other_kinds_conform(stack: Stack) -> None:
    dates = _answer(stack, 1, regex=r"\d{4}-(0[1-9]|1[0-2]): [a-z]{3,9}\.")
    assert re.fullmatch(r"\d{4}-(0[1-9]|1[0-2]): [a-z]{3,9}\.", dates.text)
    assert _answer(stack, 2, choice=["Lübeck", "Lisbon 😀", "Łeba"]).text in ("Lübeck", "Lisbon 😀", "Łeba")
    lark = 'start: "It is " WORD ("," " " WORD)? "."\nWORD: "cold" | "warm" | "windy"'
    assert re.fullmatch(
        r"It is (cold|warm|windy)(, (cold|warm|windy))?\.", _answer(stack, 3, grammar=lark).text
    )
    gbnf = Grammar(kind=GrammarKind.GBNF, text='root ::= ("sea" | "sky")+ "!"{1,2}')
    answer = _answer(stack, 4, grammar=gbnf)
    assert re.fullmatch(
        "(sea|sky)+!{1,2}" if answer.finish_reason is FinishReason.STOP else ".*", answer.text
    )


def test_the_same_request_gives_the_same_answer(stack: Stack) -> None:
    first, second = (_answer(stack, 9, json_schema=CITY) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.text == second.text


HOSTILE: dict[str, Any] = {
    "huge enum": {"json_schema": {"enum": [f"value {i}" for i in range(4500)]}},
    "deep": {"json_schema": '{"items":' * 70 + "{}" + "}" * 70},
    "recursive": {"json_schema": {"items": {"$ref": "#"}, "type": "array", "minItems": 1}},
    "endless": {"json_schema": {"$ref": "#"}},
    "multiples": {"json_schema": {"multipleOf": 999_983}},
    "exponential": {"regex": "(a|a)*b{1000}"},
    "determinising": {"regex": "(.*a.{30}){3}"},
    "long": {"regex": "x" * (MAX_GRAMMAR_BYTES + 1)},
    "slow": {"regex": "a?" * 8_000 + "a" * 8_000},
    "ambiguous": {"grammar": 'start: e\ne: e e e e | e e e | e e | "a" | ""'},
    "chain": {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'},
    "unknown keyword": {"json_schema": {"type": "array", "uniqueItems": True}},
}


def test_hostile_grammars_end_with_a_type_while_a_plain_request_goes_on(stack: Stack) -> None:
    with stack.client() as client:
        alone = client.generate(PROMPT, **PLAIN).result()

        def attack(name: str) -> Result | PdserveError:
            form = HOSTILE[name]
            try:
                return client.generate(
                    PROMPT, max_tokens=20, temperature=1.0, seed=5, deadline_s=60.0, **form
                ).result()
            except PdserveError as error:
                return error

        with ThreadPoolExecutor(len(HOSTILE)) as pool:
            plain = client.generate(PROMPT, **PLAIN)
            attacks = {name: pool.submit(attack, name) for name in HOSTILE}
            beside = plain.result()
            ended = {name: future.result() for name, future in attacks.items()}
    assert beside.token_ids == alone.token_ids
    for name in ("deep", "endless", "multiples", "long", "unknown keyword"):
        error = ended[name]
        assert isinstance(error, InvalidRequest), (name, error)
        assert error.violations[0].field == "sampling.grammar"
    for name in ("huge enum", "exponential"):
        assert isinstance(ended[name], Result) or "s to compile" in str(ended[name])
    for error in ended.values():
        if isinstance(error, PdserveError):
            assert error.label in ("invalid_request", "overloaded"), error
            assert not re.search(r"0x[0-9a-f]{6}|/home|/tmp|\.py|\.rs|Traceback|panic", str(error)), error
    stack.until_idle()
    with stack.client() as client:
        assert client.generate(PROMPT, **PLAIN).result().token_ids == alone.token_ids


def test_what_can_not_go_with_a_grammar_is_refused(stack: Stack) -> None:
    with stack.client() as client, pytest.raises(InvalidRequest, match=r"sampling\.ignore_eos"):
        client.generate(PROMPT, regex="a+", ignore_eos=True).result()


def test_a_grammar_that_forbids_what_other_fields_ask_for_fails_its_request_alone(stack: Stack) -> None:
    with stack.client() as client, pytest.raises(InvalidRequest, match="no token is possible"):
        client.generate(PROMPT, choice=["yes"], min_tokens=20, max_tokens=30).result()
    assert _answer(stack, 1, choice=["yes"]).text == "yes"
