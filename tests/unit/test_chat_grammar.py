"""Grammars of tool calls allow what the format's parser reads as calls of the tools, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from jsonschema import validate

from pdserve.api import Tool, ToolChoice, ToolMode
from pdserve.chat.formats import FORMATS, THINK_TAGS, ThinkTags
from pdserve.chat.grammar import MAX_CALLS, grammar_for
from pdserve.chat.parser import ChatParser, ChatPlan
from pdserve.chat.parts import joined
from pdserve.errors import InvalidRequest
from pdserve.structured.compile import compile_grammar
from pdserve.structured.vocabulary import load_vocabulary
from pdserve.tokenizer import Tokenizer, TokenizerBundle, load_bundle_from_dir
from tests.support.tokenizer_files import write_directory

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"], "additionalProperties": False, "$defs": {"name": {"type": "string"}},
}  # fmt: skip
TOOLS = (Tool(name="weather", parameters=json.dumps(SCHEMA)), Tool(name="now"))
REQUIRED, NAMED = ToolChoice(mode=ToolMode.REQUIRED), ToolChoice(mode=ToolMode.NAMED, name="weather")
PARIS = '{"city": "Paris", "days": 3}'
DEEP = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEP31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
    "mistral11": f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    "llama3": f'{{"name": "weather", "parameters": {PARIS}}}',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]',
    "deepseek": BEGIN + DEEP.format("weather", PARIS) + END,
    "deepseek31": BEGIN + DEEP31.format("weather", PARIS) + END,
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral11": ONE["mistral11"] + "[TOOL_CALLS]now[ARGS]{}",
    "llama3": ONE["llama3"] + '; {"name": "now", "parameters": {}}',
    "granite": ONE["granite"][:-1] + ', {"name": "now", "arguments": {}}]',
    "deepseek": BEGIN + DEEP.format("weather", PARIS) + DEEP.format("now", "{}") + END,
    "deepseek31": BEGIN + DEEP31.format("weather", PARIS) + DEEP31.format("now", "{}") + END,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TokenizerBundle:
    folder: Path = tmp_path_factory.mktemp("grammar")
    return load_bundle_from_dir(write_directory(folder))


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, bundle: TokenizerBundle) -> Tokenizer:
    """With marks that are text, and with marks that are special tokens."""
    if request.param == "text":
        return Tokenizer(bundle)
    spec = json.loads(bundle.tokenizer_json)
    marks = sorted(
        {m for f in FORMATS.values() for m in f.markers if len(m) > 5 and m not in ("```json", "function")}
    )
    first = bundle.vocab_size
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] += [{"id": first + n, "content": mark, **plain} for n, mark in enumerate(marks)]
    made = dataclasses.replace(
        bundle, tokenizer_json=json.dumps(spec).encode(), vocab_size=first + len(marks)
    )
    return Tokenizer(made)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the model writes it: marks as special tokens where they are."""
    return [int(i) for i in tokenizer._parsing.encode(text, add_special_tokens=False).ids]


def allows(
    tokenizer: Tokenizer, form: str, choice: ToolChoice, text: str, think: ThinkTags | None = None
) -> bool:
    """Whether an answer of this text can end there."""
    grammar = grammar_for(FORMATS[form], TOOLS, choice, think, tokenizer.special_ids)
    matcher = compile_grammar(load_vocabulary(tokenizer), grammar).start()
    return all(matcher.consume_token(i) for i in ids_of(tokenizer, text)) and matcher.is_accepting()


def read(form: str, text: str) -> list[tuple[str, str]]:
    parser = ChatParser(ChatPlan(form=FORMATS[form], tools=frozenset({"weather", "now"})), "key")
    part = joined([parser.feed(text), parser.finish()])
    assert part.text == ""
    return [(call.name, call.arguments) for call in part.tool_calls]


@pytest.mark.parametrize("form", FORMATS)
def test_one_call_of_the_tool_named(tokenizer: Tokenizer, form: str) -> None:
    assert read(form, ONE[form]) == [("weather", PARIS)]
    validate(json.loads(PARIS), SCHEMA)
    assert allows(tokenizer, form, NAMED, ONE[form])
    assert not allows(tokenizer, form, NAMED, TWO[form])
    assert not allows(tokenizer, form, NAMED, ONE[form].replace("weather", "now"))
    assert not allows(tokenizer, form, NAMED, ONE[form].replace('"Paris"', "1"))
    assert not allows(tokenizer, form, NAMED, "x" + ONE[form])
    assert not allows(tokenizer, form, NAMED, "")


@pytest.mark.parametrize("form", FORMATS)
def test_one_call_or_more_where_one_is_required(tokenizer: Tokenizer, form: str) -> None:
    assert read(form, TWO[form]) == [("weather", PARIS), ("now", "{}")]
    assert allows(tokenizer, form, REQUIRED, ONE[form])
    assert allows(tokenizer, form, REQUIRED, TWO[form])
    assert not allows(tokenizer, form, REQUIRED, TWO[form].replace("now", "later"))
    assert not allows(tokenizer, form, REQUIRED, "")


def test_calls_have_an_end(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert allows(tokenizer, "hermes", REQUIRED, "\n".join([call] * MAX_CALLS))
    assert not allows(tokenizer, "hermes", REQUIRED, "\n".join([call] * (MAX_CALLS + 1)))


@pytest.mark.parametrize("think", THINK_TAGS[:2])
def test_thoughts_come_first_where_the_prompt_ends_within_them(
    tokenizer: Tokenizer, think: ThinkTags
) -> None:
    for text in (f"I see\n\nthis{think.end}\n\n{ONE['hermes']}", f"{think.end}{ONE['hermes']}"):
        assert allows(tokenizer, "hermes", NAMED, text, think)
    assert not allows(tokenizer, "hermes", NAMED, f"I see {ONE['hermes']}", think)
    assert not allows(tokenizer, "hermes", NAMED, f"I see{think.end} well {ONE['hermes']}", think)


def test_schemas_that_make_too_large_a_grammar_are_refused() -> None:
    large = json.dumps({"type": "object", "properties": {"a": {"enum": ["x" * 60_000]}}})
    tools = (Tool(name="a", parameters=large), Tool(name="b", parameters=large))
    with pytest.raises(InvalidRequest) as caught:
        grammar_for(FORMATS["hermes"], tools, REQUIRED, None, {})
    assert caught.value.violations[0].field == "tools"
