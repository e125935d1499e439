"""Anthropic's /v1/messages: events as a message of content blocks, whole or block by block.

What does not live here: the body (`schema.messages`).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, StreamEvent, ToolCall, ToolCallDelta
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.types import FinishReason, Usage
from router import texts
from router.http.answer import Answer
from router.http.body import read
from router.http.collected import Whole, parts
from router.http.errors import anthropic_form
from router.http.gateway import Gateway
from router.http.generation import run
from router.http.route import json_response
from router.http.schema.messages import CountBody, MessagesBody
from router.http.strict_json import dump, load

_NO_USAGE = Usage()
_DELTAS = {"text": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}
_FIELDS = {"text": "text", "reasoning": "thinking", "call": "partial_json"}


async def handle(gateway: Gateway, request: Request) -> Response:
    """The handler of /v1/messages."""
    caller = gateway.caller(request)
    body = await read(request, MessagesBody)
    name = gateway.name(body.model)
    user = body.metadata.user_id if body.metadata is not None else None
    source = body.input(gateway.label(request, user))
    reply = _Stream(name) if body.stream else _Whole(name)
    return Answer(run(gateway.hub, [source], caller), reply, anthropic_form)


async def count(gateway: Gateway, request: Request) -> Response:
    """The handler of /v1/messages/count_tokens."""
    gateway.caller(request)
    body = await read(request, CountBody)
    gateway.name(body.model)
    made = await texts.tokenize(gateway.hub, body.tokenize_input())
    return json_response({"input_tokens": len(made.ids)})


def _message(request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts what came from a cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _stop(end: ChoiceEnd, called: bool) -> dict[str, Any]:
    if end.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if end.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_text}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


class _Whole(Whole):
    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def body(self) -> dict[str, Any]:
        (collected,) = self.prompts
        choice = collected.choices[0]
        calls = choice.tool_calls()
        content: list[dict[str, Any]] = []
        if thought := "".join(choice.reasoning):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if choice.text or not (thought or calls):
            content.append({"type": "text", "text": choice.text})
        content += [_tool_use(call) for call in calls]
        made = {**_message(self.request_id, self._model), **_stop(choice.end, bool(calls))}
        return {**made, "content": content, "usage": _usage(collected.usage)}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """A call that was cut off in the middle of its arguments has none."""
    try:
        given = load(call.arguments.encode())
    except InvalidRequest:
        given = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


class _Stream:
    streams = True

    def __init__(self, model: str) -> None:
        self._model = model
        self._prompt_tokens = 0
        self._request_id = ""
        self._block = -1
        self._open: tuple[str, int] | None = None
        self._begun = False
        self._called = False
        self._end: ChoiceEnd | None = None
        self._usage = _NO_USAGE

    def feed(self, prompt: int, event: StreamEvent) -> bytes:
        """See Reply."""
        match event:
            case Admitted():
                self._request_id, self._prompt_tokens = event.request_id, event.prompt_tokens
            case Chunk():
                return self._start() + b"".join(self._part(*part) for part in parts(event))
            case ChoiceEnd():
                self._end = event
                return self._start() + self._close()
            case End():
                self._usage = event.usage
            case _:
                pass
        return b""

    def _start(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = _usage(Usage(prompt_tokens=self._prompt_tokens))
        return _event("message_start", message={**_message(self._request_id, self._model), "usage": usage})

    def _part(self, kind: str, number: int, text: str, call: ToolCallDelta | None) -> bytes:
        out = b""
        if self._open != (kind, number):
            out = self._close()
            self._block += 1
            self._open = (kind, number)
            self._called |= call is not None
            out += _event("content_block_start", index=self._block, content_block=_empty(kind, call))
        if not text:
            return out
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: text}
        return out + _event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._block)

    def finish(self) -> bytes:
        """See Reply."""
        assert self._end is not None
        stop = _stop(self._end, self._called)
        return _event("message_delta", delta=stop, usage=_usage(self._usage)) + _event("message_stop")

    def failed(self, error: PdserveError) -> bytes:
        """See Reply."""
        return b"event: error\ndata: " + dump(anthropic_form(error)) + b"\n\n"


def _empty(kind: str, call: ToolCallDelta | None) -> dict[str, Any]:
    """A block as it begins."""
    if call is not None:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dump({"type": kind, **fields}) + b"\n\n"
