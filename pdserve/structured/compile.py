"""A grammar from a request, checked and compiled: what masks are made of, or a sentence about what is wrong.

What lives here: the limits of security.md, section 6, on text and depth, llguidance's own limits, and its
messages as ours. What does not: time limits and caching (`store`), how far a sequence has come (`masks`).

All limits but time are counts (bytes, levels, llguidance's fuel, states and items), so that a grammar is
refused everywhere or nowhere. Compiling leaves the interpreter's lock: other threads go on meanwhile.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from pdserve.json_depth import MAX_DEPTH, is_too_deep
from pdserve.structured.gbnf import GbnfError, to_lark
from pdserve.structured.refusal import Refused
from pdserve.types import Grammar, GrammarKind

MAX_CHOICES = 1024
MAX_LEXER_STATES = 20_000
"""Of one sequence; about 2 KB each. What needs more ends with an error of its own."""
MAX_ITEMS_IN_ROW = 4_000
"""Ways to go on at one place, such as the optional properties of an object (about 4 each). Bounds what one
sequence costs a step: some 20 ms at worst."""
LEXER_FUEL = 300_000
"""Expressions that compiling may construct."""
MAX_SYMBOLS = 10_000
"""Of all rules together; about 10 for an optional property."""
MAX_MULTIPLE = 50_000
"""Least common multiple of a schema's multipleOf, without their decimal points: an automaton has as many
states, and nothing else bounds it."""
MAX_MESSAGE_CHARS = 200
NO_FORCING = '%llguidance {"no_forcing": true}\nstart: @answer'
"""Around every grammar: where only one text can follow, any tokens that spell it are allowed."""

_NOT_SCHEMAS = ("enum", "const", "default", "examples")
_TOO_DEEP = f"its JSON is nested deeper than {MAX_DEPTH}."
_REMOTE = "refers to another document with $ref; put what it refers to under $defs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled grammar. Immutable: `start` may be called from any thread."""

    template: LLMatcher

    def start(self) -> LLMatcher:
        """A matcher at the start of an answer."""
        return self.template.deep_copy()


def compile_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> Compiled:
    """Compiles a grammar whose size was checked. Raises Refused.

    The first mask is computed here too, outside of any step: it is the dearest of many grammars, and shows
    those that allow no answer at all.
    """
    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=LEXER_FUEL,
        max_grammar_size=MAX_SYMBOLS,
        verbose_errors=False,
    )
    answer = {"name": "answer", **_FORMS[grammar.kind](grammar.text)}
    whole = json.dumps({"grammars": [{"lark_grammar": NO_FORCING}, answer]})
    matcher = LLMatcher(vocabulary, whole, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise Refused(_sentence(matcher.get_error()))
    return Compiled(template=matcher)


def size_bytes(grammar: Grammar) -> int:
    """A rough upper estimate of a compiled grammar's memory (measured: 90 to 400 bytes a character)."""
    return (256 << 10) + 512 * len(grammar.text)


def _json_schema(text: str) -> dict[str, Any]:
    schema = _parsed(text)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise Refused("a JSON schema must be an object, true or false.")
    _check_schema(schema)
    return {"json_schema": {**schema, "x-guidance": {"lenient": False}}}


def _check_schema(schema: dict[str, Any]) -> None:
    """What llguidance does not bound or would take from elsewhere. Raises Refused."""
    if "x-guidance" in schema:
        raise Refused("x-guidance is not a keyword of JSON Schema; leave it out.")
    multiples = 1
    for part in _parts(schema):
        if isinstance(part.get("$ref"), str) and not part["$ref"].startswith("#"):
            raise Refused(_REMOTE)
        multiples = math.lcm(multiples, _digits(part.get("multipleOf")))
        if multiples > MAX_MULTIPLE:
            raise Refused(f"the least common multiple of its multipleOf is over {MAX_MULTIPLE}.")


def _digits(number: Any) -> int:
    """A positive number's digits without point and trailing zeros behind it: 0.25 is 25. Others: 1."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        return 1
    _, digits, exponent = Decimal(str(number)).as_tuple()
    assert isinstance(exponent, int)
    value = int("".join(map(str, digits)))
    return value * 10**exponent if exponent > 0 else max(1, value)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects of a schema but those that are plain values."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo += [inner for key, inner in value.items() if key not in _NOT_SCHEMAS]
        elif isinstance(value, list):
            todo += value


def _parsed(text: str) -> Any:
    """JSON within the depth limit."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise Refused(_TOO_DEEP) from None
    except ValueError:
        raise Refused("its text is not JSON.") from None
    if is_too_deep(value):
        raise Refused(_TOO_DEEP)
    return value


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _choice(text: str) -> dict[str, Any]:
    choices = _parsed(text)
    good = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    if not good or not 1 <= len(choices) <= MAX_CHOICES:
        raise Refused(f"a choice must be a JSON array of 1 to {MAX_CHOICES} strings.")
    try:
        spelled = [json.dumps(each, ensure_ascii=False).encode("utf-8").decode() for each in choices]
    except UnicodeEncodeError:
        raise Refused("a choice holds half of a surrogate pair.") from None
    return {"lark_grammar": "start: " + " | ".join(spelled)}


def _regex(text: str) -> dict[str, Any]:
    return {"lark_grammar": f"start: /{regex_to_lark(text, 'd')}/"}


def _lark(text: str) -> dict[str, Any]:
    """Schemas within a grammar have the limits of others."""
    for found in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise Refused("the JSON behind a %json can not be read.") from None
        if isinstance(schema, dict):
            _check_schema(schema)
    return {"lark_grammar": text}


def _gbnf(text: str) -> dict[str, Any]:
    try:
        return {"lark_grammar": to_lark(text)}
    except GbnfError as error:
        raise Refused(f"{error}.") from None


_FORMS: dict[GrammarKind, Callable[[str], dict[str, Any]]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: _regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.LARK: _lark,
    GrammarKind.GBNF: _gbnf,
}

_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[[^\]]*\])")


def _sentence(message: str) -> str:
    """llguidance's message as ours: what is wrong with the grammar, none of its insides."""
    if (found := _UNSUPPORTED.search(message)) is not None:
        names = ", ".join(re.findall(r'"([^"]*)"', found.group(1)))
        return f"this server does not support {names[:MAX_MESSAGE_CHARS]} in a JSON schema; leave it out."
    if "Resource '" in message:
        return _REMOTE
    if "oneOf constraints" in message:
        return "oneOf is supported only where its schemas exclude each other; use anyOf."
    if "NoExtension" in message:
        return "no answer conforms to it, or none that ends."
    if message.startswith("panic") or "<state>" in message:
        return "it can not be compiled; write it in another way."
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return f"it can not be compiled: {told.removeprefix('error: ')[:MAX_MESSAGE_CHARS]}."
