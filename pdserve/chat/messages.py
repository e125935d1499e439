"""Messages and tools in the shape that chat templates take: the one transformers' apply_chat_template gives.

JSON within them is read here, once; all else was checked when the request came (`router.validate_chat`).
Here too: conversations for models whose templates know no tools (`spelled_out`). Not here: rendering, and
keeping user text apart from control tokens (`pdserve.tokenizer`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.api import ChatMessage, Tool, ToolCall
from pdserve.chat.formats import HERMES
from pdserve.chat.json_text import json_object

_NO_PARAMETERS = {"type": "object", "properties": {}}
_SHORT = 9
"""Characters of a call's id in Mistral's templates, which refuse others."""


def template_messages(messages: Sequence[ChatMessage], *, short_ids: bool = False) -> list[dict[str, Any]]:
    """Messages as mappings. short_ids: the template takes ids of 9 letters and digits only.

    Raises InvalidRequest for arguments of calls that are no JSON object.
    """
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_message(message, called, short_ids) for message in messages]


def _message(message: ChatMessage, called: Mapping[str, str], short_ids: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": _id(call.id, short_ids),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        out["tool_call_id"] = _id(message.tool_call_id, short_ids)
        if message.tool_call_id in called:
            out["name"] = called[message.tool_call_id]
    return out


def _arguments(call: ToolCall) -> dict[str, Any]:
    return json_object("chat.messages.tool_calls.arguments", call.arguments or "{}")


def _id(text: str, short: bool) -> str:
    if not short or (len(text) == _SHORT and text.isascii() and text.isalnum()):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as mappings; a description that is empty is left out. Raises InvalidRequest for parameters that
    are no JSON object."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    parameters = json_object("tools.parameters", tool.parameters) if tool.parameters else _NO_PARAMETERS
    return {"name": tool.name, **described, "parameters": parameters}


def spelled_out(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """A conversation in the Hermes format for a template without tools: they stand in the system message,
    calls in the assistant's text, and what they gave in messages of the user."""
    first, rest = (messages[0], messages[1:]) if messages[0].role == "system" else (None, messages)
    out: list[dict[str, Any]] = []
    if tools:
        parts = [first.content] if first is not None and first.content else []
        out.append({"role": "system", "content": "\n\n".join([*parts, _introduction(tools)])})
    elif first is not None:
        out.append({"role": "system", "content": first.content})
    return out + [_spelled(message) for message in rest]


def _introduction(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools))
    call = '{"name": <name of the function>, "arguments": <object of its arguments>}'
    return (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, write:\n{HERMES.begin}\n{call}\n{HERMES.end}"
    )


def _spelled(message: ChatMessage) -> dict[str, Any]:
    if message.role == "tool":
        content = f"<tool_response>\n{message.content}\n</tool_response>"
        return {"role": "user", "content": content}
    parts = [message.content] if message.content else []
    for call in message.tool_calls:
        body = {"name": call.name, "arguments": _arguments(call)}
        parts.append(f"{HERMES.begin}\n{json.dumps(body, ensure_ascii=False)}\n{HERMES.end}")
    return {"role": message.role, "content": "\n".join(parts)}
