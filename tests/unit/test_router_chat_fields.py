"""Fields of chats: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.api import ChatMessage, GenerateInput, SamplingInput, Tool, ToolCall, ToolChoice, ToolMode
from pdserve.errors import InvalidRequest
from pdserve.types import Grammar, GrammarKind
from router.validate_chat import check_chat

USER = ChatMessage(role="user", content="x")
NOW, ADD = Tool(name="now"), Tool(name="add", parameters='{"type": "object"}')
CALL = ToolCall(id="a", name="add", arguments="{}")
ANSWER = ChatMessage(role="tool", content="1", tool_call_id="a")
GRAMMAR = SamplingInput(grammar=Grammar(kind=GrammarKind.REGEX, text="a"))


def chat(*messages: ChatMessage, **fields: Any) -> GenerateInput:
    return GenerateInput(messages=(USER, *messages), **fields)


def choose(mode: ToolMode, name: str = "") -> ToolChoice:
    return ToolChoice(mode=mode, name=name)


GOOD = [
    chat(),
    chat(tools=(NOW, ADD)),
    chat(tools=(NOW, ADD), tool_choice=choose(ToolMode.NAMED, "add")),
    chat(tools=(NOW,), tool_choice=choose(ToolMode.NONE), sampling=GRAMMAR),
    chat(tool_choice=choose(ToolMode.AUTO), thinking=False),
    chat(ChatMessage(role="assistant", reasoning="hm", tool_calls=(CALL,)), ANSWER, tools=(ADD,)),
    GenerateInput(prompt="x"),
]
BAD = [
    (GenerateInput(prompt="x", tools=(NOW,)), "tools"),
    (GenerateInput(token_ids=(1,), thinking=False), "thinking"),
    (GenerateInput(prompt="x", tool_choice=choose(ToolMode.AUTO)), "tool_choice"),
    (chat(tools=tuple(Tool(name=f"t{n}") for n in range(65))), "tools"),
    (chat(tools=(Tool(name="x", description="y" * (1 + (256 << 10))),)), "tools"),
    (chat(tools=(NOW, NOW)), "tools.name"),
    *(
        (chat(tools=(Tool(name=name),)), "tools.name")
        for name in ("", "a b", "a" * 65, "é", "<|im_end|>", "a\n")
    ),
    (chat(tool_choice=choose(ToolMode.REQUIRED)), "tool_choice"),
    (chat(tools=(NOW,), tool_choice=choose(ToolMode.NAMED, "add")), "tool_choice.name"),
    (chat(tools=(NOW,), sampling=GRAMMAR), "sampling.grammar"),
    (chat(tools=(NOW,), tool_choice=choose(ToolMode.REQUIRED), sampling=GRAMMAR), "sampling.grammar"),
    (chat(ChatMessage(role="function")), "chat.messages.role"),
    (chat(ChatMessage(role="tool")), "chat.messages.tool_call_id"),
    (chat(ChatMessage(role="user", tool_call_id="a")), "chat.messages.tool_call_id"),
    (chat(ChatMessage(role="tool", tool_call_id="a" * 129)), "chat.messages.tool_call_id"),
    (chat(ChatMessage(role="user", tool_calls=(CALL,))), "chat.messages.tool_calls"),
    (chat(ChatMessage(role="user", reasoning="hm")), "chat.messages.reasoning"),
    (chat(ChatMessage(role="assistant", tool_calls=(CALL,) * 65)), "chat.messages.tool_calls"),
    (
        chat(ChatMessage(role="assistant", tool_calls=(ToolCall(id="a", name="a b", arguments=""),))),
        "chat.messages.tool_calls.name",
    ),
]


@pytest.mark.parametrize("source", GOOD)
def test_chats_in_order(source: GenerateInput) -> None:
    check_chat(source)


@pytest.mark.parametrize(("source", "field"), BAD)
def test_what_is_refused_names_its_field(source: GenerateInput, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_chat(source)
    assert caught.value.violations[0].field == field
