"""The fields of a chat: messages, tools, which of them to call. Pure; called by `router.validate`.

Not here: JSON within them, and what the model's template can do with them (`pdserve.chat.prepare`).
"""

from __future__ import annotations

import re

from pdserve.api import ChatMessage, GenerateInput, Tool, ToolMode
from pdserve.errors import InvalidRequest

MAX_MESSAGES = 1024
MAX_TOOLS = 64
MAX_TOOLS_CHARS = 256 << 10
"""Of all their descriptions and parameters."""
MAX_CALLS = 64
"""Calls in one message."""
MAX_ID_BYTES = 128
ROLES = ("system", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_RULE = "must have 1 to 64 letters, digits, _ or -."


def check_chat(source: GenerateInput) -> None:
    """Raises InvalidRequest, whose message names the field."""
    if source.messages is None:
        given = {"tools": source.tools, "tool_choice": source.tool_choice, "thinking": source.thinking}
        for name, value in given.items():
            if value not in ((), None):
                raise InvalidRequest.field(name, "is for chats; send messages, or leave it out.")
        return
    _check_messages(source.messages)
    check_tools(source.tools)
    _check_choice(source)


def check_tools(tools: tuple[Tool, ...]) -> None:
    """Raises InvalidRequest for tools that no template may see; their schemas are read later."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest.field("tools", f"may have {MAX_TOOLS} tools at most.")
    if any(not _NAME.fullmatch(tool.name) for tool in tools):
        raise InvalidRequest.field("tools.name", _NAME_RULE)
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest.field("tools.name", "must be another one for each tool.")
    if sum(len(tool.parameters) + len(tool.description) for tool in tools) > MAX_TOOLS_CHARS:
        raise InvalidRequest.field("tools", f"may have {MAX_TOOLS_CHARS} characters in all at most.")


def _check_choice(source: GenerateInput) -> None:
    choice = source.tool_choice
    offered = source.tools and (choice is None or choice.mode is not ToolMode.NONE)
    if offered and source.sampling.grammar is not None:
        raise InvalidRequest.field(
            "sampling.grammar",
            'can not hold for calls of tools too; send one of both, or tool_choice "none".',
        )
    if choice is None:
        return
    if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        _check_must(source)
    if choice.mode is ToolMode.NAMED and all(tool.name != choice.name for tool in source.tools):
        raise InvalidRequest.field("tool_choice.name", "must be the name of one of the tools.")


def _check_must(source: GenerateInput) -> None:
    """What a call that must come needs."""
    if not source.tools:
        raise InvalidRequest.field("tool_choice", "needs tools; send some, or leave it out.")
    if source.sampling.ignore_eos:
        raise InvalidRequest.field(
            "sampling.ignore_eos", "can not go with a tool_choice that needs an end token to end its call."
        )


def _check_messages(messages: tuple[ChatMessage, ...]) -> None:
    if not messages:
        raise InvalidRequest.field("chat.messages", "is empty; send at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest.field("chat.messages", f"may have {MAX_MESSAGES} messages at most.")
    for message in messages:
        _check_message(message)


def _check_message(message: ChatMessage) -> None:
    if message.role not in ROLES:
        raise InvalidRequest.field("chat.messages.role", f"must be one of {', '.join(ROLES)}.")
    if message.role != "assistant" and (message.tool_calls or message.reasoning):
        name = "tool_calls" if message.tool_calls else "reasoning"
        raise InvalidRequest.field(f"chat.messages.{name}", "is for messages of the assistant.")
    if (message.role == "tool") != bool(message.tool_call_id):
        raise InvalidRequest.field("chat.messages.tool_call_id", "is for messages of tools, which need it.")
    if len(message.tool_calls) > MAX_CALLS:
        raise InvalidRequest.field("chat.messages.tool_calls", f"may have {MAX_CALLS} calls at most.")
    _check_id("chat.messages.tool_call_id", message.tool_call_id)
    for call in message.tool_calls:
        _check_id("chat.messages.tool_calls.id", call.id)
        if not _NAME.fullmatch(call.name):
            raise InvalidRequest.field("chat.messages.tool_calls.name", _NAME_RULE)


def _check_id(name: str, text: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_ID_BYTES:
        raise InvalidRequest.field(name, f"may have {MAX_ID_BYTES} bytes at most.")
