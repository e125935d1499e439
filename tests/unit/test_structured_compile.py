"""Grammars of all kinds: what conforms, what is refused with which words, and what hostile ones cost."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.json_depth import MAX_DEPTH
from pdserve.structured.compile import MAX_SYMBOLS
from pdserve.structured.refusal import Refused, check_size
from pdserve.structured.store import STACK_BYTES
from pdserve.types import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from tests.support.grammar_kit import accepts, compiled, matcher_ids, walk

SCHEMA, REGEX, CHOICE, LARK, GBNF = (
    GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.LARK, GrammarKind.GBNF,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "answer", "conforms"),
    [
        (REGEX, "^abc$", "abc", True),
        (REGEX, "a/b", "a/b", True),
        (REGEX, "a|b", "ab", False),
        (REGEX, r"\d{3}-[a-f]+", "123-face", True),
        (REGEX, r"[^\n]+", "日本語", True),
        (REGEX, ".", "\n", False),
        (REGEX, "", "", True),
        (REGEX, "a\nb", "a\nb", True),
        (REGEX, r"\d", "٣", False),
        (CHOICE, '["yes", "no"]', "no", True),
        (CHOICE, '["yes", "no"]', "nope", False),
        (CHOICE, '["ab", "abc"]', "ab", True),
        (CHOICE, '["a\\"b\\\\c\\n\\u0001é😀/"]', 'a"b\\c\n\x01é😀/', True),
        (CHOICE, '["a|b(c)"]', "a|b(c)", True),
        (LARK, 'start: "a" b+\nb: "b" | "c"', "abcb", True),
        (LARK, 'start: "a" b+\nb: "b" | "c"', "a", False),
        (LARK, 'start: "x" %json {"type": "integer"}', "x12", True),
        (SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}', '{"a": 1}', True),
        (SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}', '{"a": "1"}', False),
        (SCHEMA, "true", '[{"any": null}]', True),
    ],
)
def test_an_answer_conforms_or_not(kind: GrammarKind, text: str, answer: str, conforms: bool) -> None:
    assert accepts(kind, text, answer) is conforms


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (SCHEMA, '{"type": "array", "uniqueItems": true}', "does not support uniqueItems"),
        (SCHEMA, '{"not": {}}', "does not support not"),
        (SCHEMA, "false", "does not support not"),
        (SCHEMA, '{"$ref": "https://example.com/s.json"}', "another document"),
        (SCHEMA, '{"properties": {"a": {"$ref": "other.json#/a"}}}', "another document"),
        (SCHEMA, '{"oneOf": [{"type": "integer"}, {"minimum": 2}]}', "oneOf"),
        (SCHEMA, '{"type": "string", "format": "idn-email"}', "idn-email"),
        (SCHEMA, '{"x-guidance": {"lenient": true}}', "x-guidance"),
        (SCHEMA, "[1]", "must be an object"),
        (SCHEMA, "{", "not JSON"),
        (SCHEMA, '{"$ref": "#"}', "no answer conforms"),
        (SCHEMA, '{"allOf": [{"multipleOf": 97}, {"multipleOf": 8923}]}', "least common multiple"),
        (SCHEMA, '{"a":' * MAX_DEPTH + "[1]" + "}" * MAX_DEPTH, "nested deeper"),
        (SCHEMA, "[" * 30_000, "nested deeper"),
        (REGEX, "a(?=b)b", "look-around"),
        (REGEX, r"(a)\1", "backreferences"),
        (REGEX, "(" * 300 + ")" * 300, "nested parentheses"),
        (CHOICE, "[]", "1 to 1024"),
        (CHOICE, json.dumps(["x"] * 1025), "1 to 1024"),
        (CHOICE, '["a", 1]', "strings"),
        (CHOICE, '{"a": 1}', "array"),
        (CHOICE, r'["\ud800"]', "surrogate"),
        (LARK, "start: x", 'unknown name: "x"'),
        (LARK, 'start: "a" | (', "can not be compiled"),
        (LARK, "start: <|im_start|>", "write it in another way"),
        (LARK, 'start: %json {"multipleOf": 999983}', "least common multiple"),
        (LARK, 'start: %json {"$ref": "http://x/y"}', "another document"),
        (LARK, 'start: %json {"x-guidance": {"lenient": true}}', "x-guidance"),
        (LARK, "start: " + "|".join(['"a" "b"'] * MAX_SYMBOLS), "too big"),
        (GBNF, "root ::= x", "there is no rule x"),
        (GBNF, 'root ::= "a"{' + "9" * 5000 + "}", "can not stand here"),
    ],
)  # fmt: skip
def test_what_can_not_be_followed_is_refused_with_a_sentence(
    kind: GrammarKind, text: str, words: str
) -> None:
    with pytest.raises(Refused, match=re.escape(words)) as caught:
        compiled(kind, text)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "x" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1), "\ud800"]
)
def test_texts_that_are_empty_too_long_or_no_unicode_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.grammar: its text"):
        check_size(Grammar(kind=REGEX, text=text))


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _chain(length: int) -> dict[str, Any]:
    links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}
    return {"$defs": {**links, str(length): {"type": "integer"}}, "$ref": "#/$defs/0"}


HOSTILE = {
    "huge enum": (SCHEMA, json.dumps({"enum": [f"v{i}" for i in range(7000)]})),
    "many properties": (SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(5000)}})),
    "deep": (SCHEMA, json.dumps(_nested(31))),
    "recursive": (SCHEMA, json.dumps({"type": "object", "additionalProperties": {"$ref": "#"}})),
    "many references": (SCHEMA, json.dumps(_chain(1800))),
    "exponential": (REGEX, "(a|a)*b{1000}"),
    "nested repeats": (REGEX, "((a{1000}){1000}){1000}"),
    "product": (SCHEMA, json.dumps({"allOf": [{"anyOf": [{"minimum": i} for i in range(6)]}] * 8})),
    "determinising": (REGEX, "(.*a.{30}){3}"),
    "ambiguous": (LARK, 'start: e\ne: e e e e | e e e | e e | "a" | ""'),
    "repeats of repeats": (LARK, 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}'),
    "intersections": (LARK, "start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in "abcdefghijklmnop")),
    "a chain of rules": (
        GBNF, "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(4000)), 'r4000 ::= "x"'])
    ),
    "a long literal": (GBNF, 'root ::= "' + "ab" * 30_000 + '"'),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_compiles_or_is_refused_and_its_masks_go_on_or_end(name: str) -> None:
    """In a thread as `store` makes them: chains of rules need its stack."""
    kind, text = HOSTILE[name]
    assert len(text.encode()) <= MAX_GRAMMAR_BYTES
    usual = threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(compiled, kind, text)
        threading.stack_size(usual)
        error = made.exception()
    if error is not None:
        assert isinstance(error, Refused)
        return
    matcher = made.result().start()
    for _ in range(50):
        matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token(matcher_ids(matcher)[0])


@pytest.mark.parametrize(
    "pattern", [r"(foo|ba[rz])+-\d{2,4}", r"[A-Z][a-z]{2,5}( [A-Z]\.)?", r"(\+\d{1,3} )?\(\d{3}\) \d{3}"]
)
@pytest.mark.parametrize("seed", range(4))
def test_answers_to_a_regex_match_it_as_python_reads_it(pattern: str, seed: int) -> None:
    answer = walk(compiled(REGEX, pattern), seed)
    if answer is not None:
        assert re.fullmatch(pattern, answer.decode())
