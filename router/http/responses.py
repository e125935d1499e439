"""OpenAI's /v1/responses: events as output items, whole or event by event. Nothing is kept.

What does not live here: the body (`schema.responses`).
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, StreamEvent, ToolCallDelta
from pdserve.errors import PdserveError
from pdserve.types import FinishReason, TokenLogprob, Usage
from router.http.answer import Answer, Reply
from router.http.body import read
from router.http.collected import parts
from router.http.errors import responses_form
from router.http.gateway import Gateway
from router.http.generation import run
from router.http.logprobs import of_chat
from router.http.response_items import OpenItem, shell, usage_json
from router.http.schema.responses import ResponsesBody
from router.http.strict_json import dump


async def handle(gateway: Gateway, request: Request) -> Response:
    """The handler of /v1/responses."""
    caller = gateway.caller(request)
    body = await read(request, ResponsesBody)
    name = gateway.name(body.model)
    source = body.generate_input(gateway.label(request, body.user or body.safety_identifier))
    reply: Reply = _Stream(body, name) if body.stream else _Whole(body, name)
    return Answer(run(gateway.hub, [source], caller), reply, responses_form)


class _Items:
    """The response as it grows. `add` gives the stream's events; the whole answer throws them away."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._body, self._model, self._created = body, model, int(time.time())
        self._request_id = ""
        self._done: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._end: ChoiceEnd | None = None
        self._usage: Usage | None = None
        self._begun = False

    def add(self, event: StreamEvent) -> list[dict[str, Any]]:
        """Takes the next event."""
        match event:
            case Admitted():
                self._request_id = event.request_id
            case Chunk():
                return [*self._start(), *self._chunk(event)]
            case ChoiceEnd():
                self._end = event
                return [*self._start(), *self._empty(), *self._close()]
            case End():
                self._usage = event.usage
            case _:
                pass
        return []

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        made = shell(self._body, f"resp_{self._request_id}", self._model, self._created)
        made["output"] = list(self._done)
        if self._usage is not None and self._end is not None:
            full = self._end.finish_reason is FinishReason.LENGTH
            made["status"] = "incomplete" if full else "completed"
            made["incomplete_details"] = {"reason": "max_output_tokens"} if full else None
            made["usage"] = usage_json(self._usage)
        return made

    def _start(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        response = self.response()
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def _empty(self) -> list[dict[str, Any]]:
        """An answer without a word is an empty message."""
        return self._switch("text", 0, None) if self._open is None and not self._done else []

    def _chunk(self, event: Chunk) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        logprobs: tuple[TokenLogprob, ...] = event.logprobs
        for kind, number, text, call in parts(event):
            out += self._switch(kind, number, call)
            assert self._open is not None
            told = of_chat(logprobs)["content"] if logprobs and kind == "text" else []
            out += self._open.grow(text, told)
        return out

    def _switch(self, kind: str, number: int, call: ToolCallDelta | None) -> list[dict[str, Any]]:
        if self._open is not None and self._open.key == (kind, number):
            return []
        out = self._close()
        self._open = OpenItem((kind, number), self._request_id, len(self._done), call)
        return [*out, *self._open.begin()]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        full = self._end is not None and self._end.finish_reason is FinishReason.LENGTH
        out = self._open.end("incomplete" if full else "completed")
        self._done.append(self._open.item)
        self._open = None
        return out


class _Whole:
    streams = False

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._items = _Items(body, model)

    def feed(self, prompt: int, event: StreamEvent) -> bytes:
        """See Reply."""
        self._items.add(event)
        return b""

    def finish(self) -> bytes:
        """See Reply."""
        return dump(self._items.response())

    def failed(self, error: PdserveError) -> bytes:
        """See Reply; never called: nothing is sent before the end."""
        raise error


class _Stream:
    streams = True

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._items = _Items(body, model)
        self._sequence = 0

    def feed(self, prompt: int, event: StreamEvent) -> bytes:
        """See Reply."""
        return b"".join(self._send(one) for one in self._items.add(event))

    def finish(self) -> bytes:
        """See Reply."""
        response = self._items.response()
        return self._send({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: PdserveError) -> bytes:
        """See Reply."""
        told = responses_form(error)["error"]
        kept = {name: told[name] for name in ("code", "message", "param")}
        return self._send({"type": "error", **kept})

    def _send(self, event: dict[str, Any]) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return b"event: " + str(event["type"]).encode() + b"\ndata: " + dump(numbered) + b"\n\n"
