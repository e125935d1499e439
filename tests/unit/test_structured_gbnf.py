"""GBNF: held against llama.cpp's syntax, and masks against all texts of small random grammars."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.structured.compile import compile_grammar
from pdserve.structured.gbnf import GbnfError, to_lark
from pdserve.types import Grammar, GrammarKind
from tests.support.grammar_kit import (
    accepts,
    compiled,
    default_bundle,
    default_tokens,
    default_vocabulary,
    matcher_ids,
)

JSON = r"""# as in llama.cpp's grammars/json.gbnf, in our words
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "answer", "conforms"),
    [
        (JSON, '{"a": [1, 2.5e3, {"b": null}], "é\\u00e9": "日本"}', True),
        (JSON, '{"a" 1}', False),
        (JSON, "[1]", False),
        ('root ::= "a" "b" "c" | "ab" "d"', "abc", True),
        ('root ::= "a" "b" "c" | "ab" "d"', "abd", True),
        ("root ::= [^a]{2}", "bé", True),
        ("root ::= [^a]{2}", "ba", False),
        ("root ::= .{2,3}", "\n😀", True),
        ('root ::= "\\u00e9" "\\x41" "\\U0001F600"', "éA😀", True),
        ("root ::= a-B\na-B ::= [a-]+", "a-a", True),
        ("root ::= [\\]\\-x^]+", "]^-x", True),
        ('root ::= (\n "a" |\n "b"\n)+ # end\n', "abba", True),
        ('root ::= x? | "b"{2}\r\nx ::= "a"', "bb", True),
        ('root ::= "x"{2,}', "x", False),
    ],
)
def test_answers_conform_as_in_llama_cpp(grammar: str, answer: str, conforms: bool) -> None:
    assert accepts(GrammarKind.GBNF, grammar, answer) is conforms


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('rule ::= "a"', "no rule root"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= a", "line 1: there is no rule a"),
        ('root ::= "a\n"', "line 1"),
        ('root ::= ("a"', "closing parenthesis"),
        ('root ::= "a" ::= "b"', "end of the rule"),
        ("root = x", "can not stand here"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\u12"', "escape"),
        ('root ::= "\\uD800"', "no character"),
        ("root ::= []", "no characters"),
        ("root ::= [b-a]", "ends before"),
        ('root ::= "a"{3,2}', "lower number first"),
        ('root ::= "a"{100000}', "repetition"),
        ("root ::= " + "(" * 100, "nested deeper"),
        ("", "no rule root"),
    ],
)
def test_what_is_not_gbnf_is_told_where(grammar: str, words: str) -> None:
    with pytest.raises(GbnfError, match=words):
        to_lark(grammar)


# ---- random grammars, and all texts of each ------------------------------------------------------------

Language = frozenset[str]
Made = tuple[str, Language]
MOST = 60


def _joined(left: Language, right: Language) -> Language:
    return frozenset(a + b for a in left for b in right)


_literals = st.text("abé", max_size=3).map(lambda text: (f'"{text}"', frozenset([text])))
_classes = st.sets(st.sampled_from("abcé"), min_size=1).map(
    lambda some: ("[" + "".join(sorted(some)) + "]", frozenset(some))
)


def _larger(inner: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def pair(make: Callable[[Made, Made], Made]) -> st.SearchStrategy[Made]:
        return st.tuples(inner, inner).map(lambda two: make(*two))

    return st.one_of(
        pair(lambda a, b: (f"({a[0]} {b[0]})", _joined(a[1], b[1]))),
        pair(lambda a, b: (f"({a[0]} | {b[0]})", a[1] | b[1])),
        inner.map(lambda a: (f"({a[0]})?", a[1] | {""})),
        inner.map(lambda a: (f"({a[0]}){{1,2}}", a[1] | _joined(a[1], a[1]))),
    )


grammars = st.recursive(_literals | _classes, _larger, max_leaves=6).filter(lambda made: len(made[1]) <= MOST)


@cache
def _by_bytes() -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for token_id, spelled in enumerate(default_tokens()):
        found.setdefault(spelled, []).append(token_id)
    return found


@settings(max_examples=60)
@given(grammars)
def test_a_mask_allows_exactly_what_some_text_of_the_language_goes_on_with(made: Made) -> None:
    body, language = made
    tokens, (end,) = default_tokens(), default_bundle().end_token_ids
    spelled = [text.encode() for text in language]
    grammar = Grammar(kind=GrammarKind.GBNF, text=f"root ::= x\nx ::= {body}")
    matcher = compile_grammar(default_vocabulary(), grammar).start()
    parts = {text[a:b] for text in spelled for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    useful = {i for part in parts for i in _by_bytes().get(part, ())}
    so_far = b""
    for _ in range(4):
        expected = {i for i in useful if any(text.startswith(so_far + tokens[i]) for text in spelled)}
        ends = {end} if so_far in spelled else set()
        assert set(matcher_ids(matcher)) == expected | ends
        if not expected:
            return
        chosen = max(expected, key=lambda i: (len(tokens[i]) % 3, i))
        assert matcher.consume_token(chosen)
        so_far += tokens[chosen]


@settings(max_examples=30)
@given(st.sampled_from([r"(ab|a)*c?", r"[a-c]{2,4}", r"x(y|yz)+", r".{3}", r"\w+@\w+"]), st.data())
def test_a_mask_allows_exactly_what_the_matcher_then_takes(pattern: str, data: st.DataObject) -> None:
    matcher = compiled(GrammarKind.REGEX, pattern).start()
    for _ in range(data.draw(st.integers(0, 3))):
        matcher.consume_token(data.draw(st.sampled_from(matcher_ids(matcher)), label="token"))
        if matcher.is_stopped():
            return
    allowed = set(matcher_ids(matcher))
    for token in (
        data.draw(st.lists(st.integers(0, default_bundle().vocab_size - 1), max_size=50)) + list(allowed)[:50]
    ):
        taken = bool(matcher.validate_tokens([token]))
        assert taken == (token in allowed), token
