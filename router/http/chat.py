"""/v1/chat/completions: events as OpenAI's `chat.completion` objects and chunks.

What does not live here: the body (`schema.chat`), and what is a call or a thought in a text (the hub).
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, PromptInfo, StreamEvent, ToolCall, ToolCallDelta
from pdserve.errors import PdserveError
from pdserve.types import Usage
from router.http.answer import Answer, PlainText, Reply, sse
from router.http.body import read
from router.http.collected import Choice, SoFar, Whole, reason, stop_reason, usage_json
from router.http.errors import openai_form
from router.http.gateway import Gateway
from router.http.generation import run
from router.http.logprobs import of_chat, of_prompt
from router.http.schema.chat import ChatBody

_NO_USAGE = Usage()


def chat_reply(body: ChatBody, model: str) -> Reply:
    """The reply to a body; model: the name it is served under."""
    body.include_usage()
    return _Stream(body, model) if body.stream else _Whole(body, model)


async def handle(gateway: Gateway, request: Request) -> Response:
    """The route's handler."""
    caller = gateway.caller(request)
    body = await read(request, ChatBody)
    reply = chat_reply(body, gateway.name(body.model))
    source = body.input(gateway.label(request, body.user))
    return Answer(run(gateway.hub, [source], caller), reply, openai_form)


def _head(kind: str, request_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": created, "model": model}


def _why(end: ChoiceEnd, called: bool) -> str:
    why = reason(end)
    return "tool_calls" if called and why == "stop" else why


class _Whole(Whole):
    def __init__(self, body: ChatBody, model: str) -> None:
        super().__init__()
        self._body, self._model, self._created = body, model, int(time.time())

    def body(self) -> dict[str, Any]:
        (run,) = self.prompts
        made = {
            **_head("chat.completion", self.request_id, self._created, self._model),
            "choices": [self._choice(index, choice) for index, choice in sorted(run.choices.items())],
            "usage": usage_json(run.usage),
        }
        if run.prompt is not None and self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = of_prompt(run.prompt.logprobs)
        if run.prompt is not None and self._body.return_token_ids:
            made["prompt_token_ids"] = run.prompt.token_ids
        return made

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        calls = choice.tool_calls()
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if reasoning := "".join(choice.reasoning):
            message["reasoning"] = reasoning
        if calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in calls]
        made: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": of_chat(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": _why(choice.end, bool(calls)),
            "stop_reason": stop_reason(choice.end),
        }
        if self._body.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class _Stream:
    streams = True

    def __init__(self, body: ChatBody, model: str) -> None:
        self._body, self._model = body, model
        self._include_usage = body.include_usage()
        self._so_far = SoFar() if body.counts_always() else None
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        self._usage = _NO_USAGE
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._plain: dict[int, PlainText] = {}

    def feed(self, prompt: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if self._so_far is not None:
            self._so_far.add(event)
        match event:
            case Chunk():
                return self._chunk(event)
            case ChoiceEnd():
                why = _why(event, event.choice in self._called)
                told = {"finish_reason": why, "stop_reason": stop_reason(event)}
                return self._first(event.choice) + self._send(event.choice, {}, told)
            case PromptInfo():
                return self._prompt(event)
            case End():
                self._usage = event.usage
            case Admitted():
                head = _head("chat.completion.chunk", event.request_id, self._created, self._model)
                self._head = self._head or head
        return b""

    def _chunk(self, event: Chunk) -> bytes:
        plain = self._plain.get(event.choice)
        if plain and event.text and not (event.reasoning or event.tool_calls or event.logprobs):
            return plain.event(event.text)
        delta: dict[str, Any] = {"content": event.text} if event.text else {}
        if event.reasoning:
            delta["reasoning"] = event.reasoning
        if event.tool_calls:
            self._called.add(event.choice)
            delta["tool_calls"] = [_delta(part) for part in event.tool_calls]
        more: dict[str, Any] = {}
        if event.logprobs:
            more["logprobs"] = of_chat(event.logprobs)
        if self._body.return_token_ids:
            more["token_ids"] = event.token_ids
        first = self._first(event.choice)
        return first + self._send(event.choice, delta, more) if delta or more else first

    def _first(self, choice: int) -> bytes:
        """What says whose message it is, before all else of a choice."""
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        if self._so_far is None and not self._body.return_token_ids:
            self._plain[choice] = PlainText(lambda text: self._send(choice, {"content": text}, {}))
        return self._send(choice, {"role": "assistant", "content": ""}, {})

    def _prompt(self, event: PromptInfo) -> bytes:
        told: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = of_prompt(event.logprobs)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = event.token_ids
        return sse({**self._head, "choices": [], **told}) if told else b""

    def _send(self, index: int, delta: dict[str, Any], more: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        counts = {} if self._so_far is None else {"usage": self._so_far.json()}
        return sse({**self._head, "choices": [choice], **counts})

    def finish(self) -> bytes:
        """See Reply."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        last = {**self._head, "choices": [], "usage": usage_json(self._usage)}
        return sse(last) + b"data: [DONE]\n\n"

    def failed(self, error: PdserveError) -> bytes:
        """See Reply."""
        return sse(openai_form(error)) + b"data: [DONE]\n\n"


def _delta(part: ToolCallDelta) -> dict[str, Any]:
    """A part of a call; its first one says which."""
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.name:
        function = {"name": part.name, **function}
    made: dict[str, Any] = {"index": part.index, "function": function}
    return {**made, "id": part.id, "type": "function"} if part.id else made
