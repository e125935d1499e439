"""Parts of a response object: one output item as it grows, the object around the items, token counts.

What does not live here: which item an event belongs to (`responses`).
"""

from __future__ import annotations

from typing import Any

from pdserve.api import ToolCallDelta
from pdserve.types import Usage
from router.http.schema.responses import ResponsesBody

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PART = {"text": "output_text", "reasoning": "reasoning_text"}
_EVENT = {"text": "response.output_text", "reasoning": "response.reasoning_text"}


class OpenItem:
    """The item that is being made. key: its kind and number; see `collected.parts`."""

    def __init__(self, key: tuple[str, int], request_id: str, index: int, call: ToolCallDelta | None) -> None:
        self.key, self._kind = key, key[0]
        self._id = f"{_PREFIX[self._kind]}_{request_id}_{index}"
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self.item = self._empty(call)

    def _empty(self, call: ToolCallDelta | None) -> dict[str, Any]:
        made: dict[str, Any] = {"id": self._id, "status": "in_progress"}
        if call is not None:
            named = {"call_id": call.id, "name": call.name, "arguments": ""}
            return {"type": "function_call", **made, **named}
        if self._kind == "reasoning":
            return {"type": "reasoning", **made, "summary": [], "content": []}
        return {"type": "message", **made, "role": "assistant", "content": []}

    def begin(self) -> list[dict[str, Any]]:
        """Events that open it."""
        opened = {"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}
        if self._kind == "call":
            return [opened]
        return [opened, self._of_part("response.content_part.added", part=self._part())]

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Events of more of its text."""
        if not text:
            return []
        self._texts.append(text)
        self._logprobs += logprobs
        if self._kind == "call":
            return [self._of_item("response.function_call_arguments.delta", delta=text)]
        more: dict[str, Any] = {"delta": text}
        if self._kind == "text":
            more["logprobs"] = logprobs
        return [self._of_part(f"{_EVENT[self._kind]}.delta", **more)]

    def end(self, status: str) -> list[dict[str, Any]]:
        """Events that close it; `item` is complete then."""
        text = "".join(self._texts)
        if self._kind == "call":
            self.item = {**self.item, "arguments": text, "status": status}
            told = {"arguments": text, "name": self.item["name"]}
            out = [self._of_item("response.function_call_arguments.done", **told)]
        else:
            part = self._part(text)
            self.item = {**self.item, "content": [part], "status": status}
            more = {"logprobs": self._logprobs} if self._kind == "text" else {}
            out = [
                self._of_part(f"{_EVENT[self._kind]}.done", text=text, **more),
                self._of_part("response.content_part.done", part=part),
            ]
        closed = {"type": "response.output_item.done", "output_index": self._index, "item": self.item}
        return [*out, closed]

    def _part(self, text: str = "") -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PART[self._kind], "text": text}
        return {**part, "annotations": [], "logprobs": self._logprobs} if self._kind == "text" else part

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._id, "output_index": self._index, **more}

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **more)


def shell(body: ResponsesBody, response_id: str, model: str, created: int) -> dict[str, Any]:
    """A response without output, which tells what was asked for."""
    tools = [tool.model_dump() for tool in body.tools or ()]
    format_ = None if body.text is None else body.text.format
    shown = {"type": "text"} if format_ is None else format_.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return {
        "id": response_id, "object": "response", "created_at": created, "status": "in_progress",
        "error": None, "incomplete_details": None, "instructions": body.instructions, "model": model,
        "output": [], "parallel_tool_calls": True, "previous_response_id": None, "store": False,
        "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
        "temperature": body.temperature, "top_p": body.top_p, "truncation": "disabled",
        "text": {"format": shown}, "tools": tools,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(), "usage": None,
    }  # fmt: skip


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts as responses tell them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
