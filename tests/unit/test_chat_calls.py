"""Tool calls in the texts that models write: found however the text is cut, and text where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.chat.formats import FORMATS, THINK_TAGS
from pdserve.chat.parser import ChatParser, ChatPlan, call_id
from pdserve.chat.parts import Part, joined

NAMES = frozenset({"get_weather", "add", "now"})
DEEP_CALL, DEEP_SEP, DEEP_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEP_BEGIN, DEEP_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class Case:
    """An answer, and what is in it: calls as (name, text of the arguments)."""

    form: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""


PARIS = '{"city": "Paris", "note": "a \\"quote\\" and } é 🙂"}'
CASES = {
    "qwen": Case("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
                 (("get_weather", PARIS),)),
    "qwen-text-and-two": Case(
        "hermes", 'I look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"a": [1, {"b": 2}], "c": -1.5e3}, "name": "add"}\n</tool_call>',
        (("now", "{}"), ("add", '{"a": [1, {"b": 2}], "c": -1.5e3}')), "I look."),
    "no-arguments": Case("hermes", '<tool_call>{"name": "now"}</tool_call>', (("now", "{}"),)),
    "text-behind": Case("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call> done',
                        (("now", "{}"),), " done"),
    "cut-off": Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', (("add", '{"a": 1'),)),
    "cut-off-in-the-end-mark": Case("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_c',
                                    (("now", "{}"),)),
    "damaged-arguments": Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,,}}</tool_call>',
                              (("add", '{"a": 1,'),), ",}}</tool_call>"),
    "damaged-before": Case("hermes", "a <tool_call>{'name': 1}</tool_call> b",
                           content="a <tool_call>{'name': 1}</tool_call> b"),
    "unknown-name": Case("hermes", '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>',
                         content='<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>'),
    "arguments-as-text": Case("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
                              content='<tool_call>{"name": "add", "arguments": "{}"}</tool_call>'),
    "name-twice": Case("hermes", '<tool_call>{"name": "add", "name": "now"}</tool_call>',
                       content='<tool_call>{"name": "add", "name": "now"}</tool_call>'),
    "half-a-mark": Case("hermes", "see <tool_cal and <tool_call", content="see <tool_cal and <tool_call"),
    "missing-end-mark": Case(
        "hermes", '<tool_call>{"name": "now"}<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        (("now", "{}"), ("add", "{}"))),
    "xml": Case("hermes", "<tool_call>\n<function=now>\n</function>\n</tool_call>",
                content="<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    "nemo": Case("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, '
                 '{"name": "now", "arguments": {}}]', (("add", '{"a": 1}'), ("now", "{}"))),
    "nemo-no-list": Case("mistral", "[TOOL_CALLS] none", content="[TOOL_CALLS] none"),
    "small": Case("mistral11", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
                  (("add", '{"a": 1}'), ("now", "{}"))),
    "granite": Case("granite", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
                    (("add", '{"a": 1}'),)),
    "llama": Case("llama3", '\n{"name": "add", "parameters": {"a": "b"}}', (("add", '{"a": "b"}'),)),
    "llama-tag-and-two": Case(
        "llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}; '
        '{"name": "now", "parameters": {}}', (("add", "{}"), ("now", "{}"))),
    "llama-other-json": Case("llama3", '{"name": "Bob", "age": 3} it is',
                             content='{"name": "Bob", "age": 3} it is'),
    "llama-text": Case("llama3", 'See {"name": "now", "parameters": {}}',
                       content='See {"name": "now", "parameters": {}}'),
    "deepseek": Case(
        "deepseek", f"So:{DEEP_BEGIN}{DEEP_CALL}function{DEEP_SEP}add\n```json\n"
        f'{{"a": 1}}\n```{DEEP_CALL_END}\n'
        f"{DEEP_CALL}function{DEEP_SEP}now\n```json\n{{}}\n```\n{DEEP_CALL_END}{DEEP_END}",
        (("add", '{"a": 1}'), ("now", "{}")), "So:"),
    "deepseek31": Case(
        "deepseek31", f'{DEEP_BEGIN}{DEEP_CALL}add{DEEP_SEP}{{"a": 1}}{DEEP_CALL_END}'
        f"{DEEP_CALL}now{DEEP_SEP}{{}}{DEEP_CALL_END}{DEEP_END}", (("add", '{"a": 1}'), ("now", "{}"))),
}  # fmt: skip


def parsed(form: str, pieces: list[str]) -> Part:
    parser = ChatParser(ChatPlan(form=FORMATS[form], tools=NAMES), "request")
    return joined([*map(parser.feed, pieces), parser.finish()])


def calls_of(part: Part) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, call.arguments) for call in part.tool_calls)


@pytest.mark.parametrize("name", CASES)
def test_each_format(name: str) -> None:
    case = CASES[name]
    for pieces in ([case.text], list(case.text)):
        part = parsed(case.form, pieces)
        assert calls_of(part) == case.calls
        assert part.text == case.content
        assert [call.id for call in part.tool_calls] == [
            call_id("request", n) for n in range(len(case.calls))
        ]


@given(name=st.sampled_from(sorted(CASES)), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_it_does_not_matter_how_the_text_is_cut(name: str, cuts: list[int]) -> None:
    case = CASES[name]
    ends = sorted({cut % (len(case.text) + 1) for cut in cuts} | {0, len(case.text)})
    pieces = [case.text[a:b] for a, b in pairwise(ends)]
    assert parsed(case.form, pieces) == parsed(case.form, [case.text])


marks = sorted({mark for form in FORMATS.values() for mark in form.markers})
pieces_of_calls = st.sampled_from(
    [
        *marks,
        '{"name": "now", ',
        '"arguments": {',
        '"parameters": {}',
        "}",
        "}}",
        '"a": 1',
        ",",
        "[",
        "]",
        "\n",
        "x",
    ]
)


@given(form=st.sampled_from(sorted(FORMATS)), pieces=st.lists(pieces_of_calls, max_size=14))
def test_any_mixture_is_the_same_in_pieces_and_letter_by_letter(form: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parsed(form, pieces)
    assert whole == parsed(form, list(text)) == parsed(form, [text])
    if not whole.tool_calls:  # what is no call comes out as it is
        assert whole.text == text
    for call in whole.tool_calls:
        assert call.name == "now"


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].calls])
def test_nothing_of_a_call_or_its_marks_is_text_at_any_time(name: str) -> None:
    case = CASES[name]
    parser = ChatParser(ChatPlan(form=FORMATS[case.form], tools=NAMES), "request")
    given_out = ""
    for char in case.text:
        given_out += parser.feed(char).text
        assert case.content.startswith(given_out)


def test_arguments_come_as_they_are_written() -> None:
    parser = ChatParser(ChatPlan(form=FORMATS["hermes"], tools=NAMES), "request")
    pieces = ('<tool_call>{"name": "add", "arguments": {"a": [1', ", 2", "]}", "}\n</tool_call>")
    given_out = [calls_of(parser.feed(piece)) for piece in pieces]
    assert given_out == [(("add", '{"a": [1'),), (("", ", 2"),), (("", "]}"),), ()]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": ' + '{"a": [' * 50_000,
        '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 300_000,
        '<tool_call>{"arguments": {"a": "' + "x" * 300_000,
        '<tool_call>{"name": "' + "x" * 300_000,
        '<tool_call>{"other": "' + "x" * 300_000,
        "<tool_call>" + " " * 300_000,
        "<tool_call>" * 30_000,
        '<tool_call>{"x":' * 20_000,
        " \n" * 150_000,
    ],
    ids=lambda text: text[:30],
)
def test_hostile_answers_cost_little(text: str) -> None:
    parser = ChatParser(ChatPlan(form=FORMATS["hermes"], tools=NAMES), "request")
    parts = [parser.feed(text[at : at + 50]) for at in range(0, len(text), 50)]
    whole = joined([*parts, parser.finish()])
    given_out = len(whole.text) + sum(len(call.arguments) for call in whole.tool_calls)
    assert given_out >= len(text) - 60


def test_white_space_without_end_before_a_bare_call_is_text() -> None:
    parser = ChatParser(ChatPlan(form=FORMATS["llama3"], tools=NAMES), "request")
    text = " " * 100_000 + "x"
    parts = [parser.feed(text[at : at + 80]) for at in range(0, len(text), 80)]
    assert joined([*parts, parser.finish()]) == Part(text=text)


def test_without_tools_a_call_is_text() -> None:
    text = CASES["qwen"].text
    parser = ChatParser(ChatPlan(think=THINK_TAGS[0]), "request")
    assert joined([parser.feed(text), parser.finish()]) == Part(text=text)


def test_ids_depend_on_the_stream_and_the_call_alone() -> None:
    ids = {call_id(key, index) for key in ("a", "b") for index in range(3)}
    assert len(ids) == 6
    assert call_id("a", 1) == call_id("a", 1)
    assert all(each.startswith("call_") and len(each) == 29 for each in ids)
