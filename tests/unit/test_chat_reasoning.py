"""What a model thinks before it answers is told apart from the answer, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.chat.formats import HERMES, THINK_TAGS
from pdserve.chat.parser import ChatParser, ChatPlan
from pdserve.chat.parts import Part, joined

THINK = THINK_TAGS[0]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CASES = [
    ("<think>\nso it is\n</think>\n\nYes.", False, "so it is", "Yes."),
    ("\n<think>so\n\nit is</think>Yes.\n", False, "so\n\nit is", "Yes.\n"),
    ("so it is\n</think>\n\nYes.", True, "so it is", "Yes."),
    ("\n</think>\n\nYes.", True, "", "Yes."),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("<think>\nnever ends </think", False, "never ends </think", ""),
    ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    ("<thin", False, "", "<thin"),
    (" \n", False, "", " \n"),
    ("<think>a <think> b</think>c </think>", False, "a <think> b", "c </think>"),
    ("", True, "", ""),
]


def parsed(plan: ChatPlan, pieces: list[str]) -> Part:
    parser = ChatParser(plan, "request")
    return joined([*map(parser.feed, pieces), parser.finish()])


@pytest.mark.parametrize(("text", "inside", "reasoning", "answer"), CASES)
def test_thoughts_and_answer(text: str, inside: bool, reasoning: str, answer: str) -> None:
    plan = ChatPlan(think=THINK, inside=inside)
    assert parsed(plan, [text]) == parsed(plan, list(text)) == Part(text=answer, reasoning=reasoning)


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "word", "<"]), max_size=10
)


@given(pieces=pieces, inside=st.booleans())
def test_it_does_not_matter_how_the_text_is_cut(pieces: list[str], inside: bool) -> None:
    plan = ChatPlan(think=THINK, inside=inside)
    assert parsed(plan, pieces) == parsed(plan, list("".join(pieces)))


def test_calls_behind_the_thoughts_are_calls_and_those_within_are_not() -> None:
    plan = ChatPlan(think=THINK, form=HERMES, tools=frozenset({"f"}))
    part = parsed(plan, list(f"<think>\nI could {CALL}\n</think>\n\n{CALL}"))
    assert part.reasoning == f"I could {CALL}"
    assert part.text == ""
    assert [(call.name, call.arguments) for call in part.tool_calls] == [("f", '{"a": 1}')]
