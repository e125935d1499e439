"""Chats with tools and thoughts have the ids that transformers' apply_chat_template gives, for every template
that we support tools with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.api import ChatMessage, GenerateInput, Tool, ToolCall
from pdserve.chat.prepare import prepare
from pdserve.chat.profile import profile_of
from pdserve.tokenizer import Tokenizer, load_bundle_from_dir
from tests.support.tokenizer_files import chat_templates, write_directory

transformers = pytest.importorskip("transformers")

PARAMETERS = (
    '{"type": "object", "properties": {"city": {"type": "string", '
    '"description": "Where, \\"exactly\\" \\u00e9"}, "im_end": {"type": "integer"}}, "required": ["city"]}'
)
TOOLS = (
    Tool(name="get_weather", description="The weather <now>.", parameters=PARAMETERS),
    Tool(
        name="add",
        description="Adds.",
        parameters='{"type": "object", "properties": {"a": {"type": "number"}}}',
    ),
)
CALL = ToolCall(id="abcdefghi", name="get_weather", arguments='{"city": "Paris |x|", "im_end": 3}')
CHATS = {
    "first": (ChatMessage(role="user", content="Weather?"),),
    "system": (ChatMessage(role="system", content="Be nice."), ChatMessage(role="user", content="Weather?")),
    "answered": (
        ChatMessage(role="user", content="Weather?"),
        ChatMessage(role="assistant", tool_calls=(CALL,)),
        ChatMessage(role="tool", content='{"sky": "blue|"}', tool_call_id="abcdefghi"),
    ),
    "again": (
        ChatMessage(role="user", content="Weather?"),
        ChatMessage(role="assistant", content="I look.", reasoning="They ask.", tool_calls=(CALL,)),
        ChatMessage(role="tool", content="sunny", tool_call_id="abcdefghi"),
        ChatMessage(role="assistant", content="Sunny."),
        ChatMessage(role="user", content="Thanks."),
    ),
}  # fmt: skip


def plain(message: ChatMessage) -> dict[str, Any]:
    """The message as a user of transformers writes it."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        arguments = {"city": "Paris |x|", "im_end": 3}
        function = {"name": "get_weather", "arguments": arguments}
        out["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": function}]
    if message.role == "tool":
        out |= {"tool_call_id": message.tool_call_id, "name": "get_weather"}
    return out


PLAIN_TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather <now>.", "parameters": {
            "type": "object", "properties": {
                "city": {"type": "string", "description": 'Where, "exactly" é'},
                "im_end": {"type": "integer"}},
            "required": ["city"]}}},
    {"type": "function", "function": {
        "name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}},
]  # fmt: skip


@pytest.fixture(scope="module", params=[name for name, _ in chat_templates()])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder: Path = tmp_path_factory.mktemp("chat")
    write_directory(folder, template=dict(chat_templates())[request.param])
    return Tokenizer(load_bundle_from_dir(folder)), transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_ids_are_those_of_transformers(pair: tuple[Tokenizer, Any], chat: str, thinking: bool | None) -> None:
    ours, oracle = pair
    assert ours.template is not None
    profile = profile_of(ours.template, dict(ours.bundle.special_tokens))
    tools = TOOLS if profile.form is not None else ()
    messages = CHATS[chat] if tools else CHATS["system"]
    asked = GenerateInput(messages=messages, tools=tools, thinking=thinking if profile.has_switch else None)
    switch = {} if asked.thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    expected = oracle.apply_chat_template(
        [plain(m) for m in messages], tools=PLAIN_TOOLS if tools else None, add_generation_prompt=True,
        return_dict=False, **switch,
    )  # fmt: skip
    prepared = prepare(asked, profile)
    assert ours.encode_chat(prepared.messages, tools=prepared.tools, options=prepared.options) == expected
