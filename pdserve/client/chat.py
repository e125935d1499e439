"""Messages and tools of chats, as dataclasses or as plain mappings such as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.api import ChatMessage, Tool, ToolCall, ToolChoice, ToolMode
from pdserve.errors import InvalidRequest

Message = ChatMessage | Mapping[str, Any]
"""role and content, and what else a ChatMessage has."""
ToolLike = Tool | Mapping[str, Any]
"""name, description and parameters: a JSON schema of an object, as a mapping or as text."""

_MESSAGE = frozenset(ChatMessage.__dataclass_fields__)
_TOOL = frozenset(Tool.__dataclass_fields__)


def message_of(message: Message) -> ChatMessage:
    """Raises InvalidRequest for a mapping without a role, or with names that no message has."""
    if isinstance(message, ChatMessage):
        return message
    needed = {"role"} if message.get("tool_calls") else {"role", "content"}
    if not needed <= set(message) <= _MESSAGE:
        raise InvalidRequest.field("messages", 'each must have "role" and "content", and no unknown names.')
    values = dict(message)
    values["tool_calls"] = tuple(map(_call_of, values.get("tool_calls") or ()))
    values["content"] = values.get("content") or ""
    return ChatMessage(**values)


def _call_of(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    inner = call.get("function", call)
    return ToolCall(id=call.get("id", ""), name=inner["name"], arguments=_text(inner.get("arguments", "")))


def tool_of(tool: ToolLike) -> Tool:
    """Raises InvalidRequest for a mapping without a name, or with names that no tool has."""
    if isinstance(tool, Tool):
        return tool
    inner = tool["function"] if set(tool) == {"type", "function"} else tool
    if not {"name"} <= set(inner) <= _TOOL:
        raise InvalidRequest.field("tools", 'each must have a "name", and no unknown names.')
    return Tool(**{**inner, "parameters": _text(inner.get("parameters", ""))})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tool_choice_of(choice: ToolChoice | str | None) -> ToolChoice | None:
    """Raises InvalidRequest for a mode that is none."""
    if choice is None or isinstance(choice, ToolChoice):
        return choice
    if choice not in (ToolMode.AUTO, ToolMode.NONE, ToolMode.REQUIRED):
        raise InvalidRequest.field(
            "tool_choice", '"auto", "none", "required", or ToolChoice(mode=ToolMode.NAMED, name=...).'
        )
    return ToolChoice(mode=ToolMode(choice))
