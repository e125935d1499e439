"""/v1/completions: events as OpenAI's `text_completion` objects and chunks.

Choice i of prompt p has the index p * n + i. What does not live here: the body (`schema.completions`).
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, PromptInfo, StreamEvent
from pdserve.errors import PdserveError
from pdserve.types import TokenLogprob, Usage
from router.http.answer import Answer, PlainText, Reply, sse
from router.http.body import read
from router.http.collected import Choice, Collected, SoFar, Whole, reason, stop_reason, sum_usage, usage_json
from router.http.errors import openai_form
from router.http.gateway import Gateway
from router.http.generation import run
from router.http.logprobs import of_completion, of_prompt
from router.http.schema.completions import CompletionBody


def completion_reply(body: CompletionBody, model: str) -> Reply:
    """The reply to a body; model: the name it is served under."""
    body.include_usage()
    return _Stream(body, model) if body.stream else _Whole(body, model)


async def handle(gateway: Gateway, request: Request) -> Response:
    """The route's handler."""
    caller = gateway.caller(request)
    body = await read(request, CompletionBody)
    reply = completion_reply(body, gateway.name(body.model))
    inputs = body.inputs(gateway.label(request, body.user))
    return Answer(run(gateway.hub, inputs, caller), reply, openai_form)


def _head(request_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}


class _Whole(Whole):
    def __init__(self, body: CompletionBody, model: str) -> None:
        super().__init__(len(body.prompts()))
        self._body, self._model, self._created = body, model, int(time.time())

    def body(self) -> dict[str, Any]:
        n = self._body.n or 1
        choices = [
            self._choice(p * n + number, prompt, choice)
            for p, prompt in enumerate(self.prompts)
            for number, choice in sorted(prompt.choices.items())
        ]
        usage = usage_json(sum_usage([prompt.usage for prompt in self.prompts]))
        return {**_head(self.request_id, self._created, self._model), "choices": choices, "usage": usage}

    def _choice(self, index: int, prompt: Collected, choice: Choice) -> dict[str, Any]:
        asked, info = self._body, prompt.prompt
        echoed = info.text if info is not None and asked.echo else ""
        made: dict[str, Any] = {
            "index": index,
            "text": echoed + choice.text,
            "logprobs": None if asked.logprobs is None else self._logprobs(prompt, choice),
            "finish_reason": reason(choice.end),
            "stop_reason": stop_reason(choice.end),
        }
        if info is not None and asked.prompt_logprobs is not None:
            made["prompt_logprobs"] = of_prompt(info.logprobs)
        if asked.return_token_ids:
            made["token_ids"] = choice.token_ids
            made["prompt_token_ids"] = list(info.token_ids) if info is not None else None
        return made

    def _logprobs(self, prompt: Collected, choice: Choice) -> dict[str, Any]:
        before = prompt.prompt.logprobs if prompt.prompt is not None and self._body.echo else ()
        return of_completion([*before, *choice.logprobs], 0, first=bool(before))


class _Stream:
    streams = True

    def __init__(self, body: CompletionBody, model: str) -> None:
        self._body, self._model, self._n = body, model, body.n or 1
        self._include_usage = body.include_usage()
        self._so_far = SoFar() if body.counts_always() else None
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        self._usages: list[Usage] = []
        self._offsets: dict[int, int] = {}
        self._plain: dict[int, PlainText] = {}

    def feed(self, prompt: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if self._so_far is not None:
            self._so_far.add(event)
        match event:
            case Chunk():
                return self._chunk(prompt * self._n + event.choice, event)
            case ChoiceEnd():
                return self._end(prompt * self._n + event.choice, event)
            case PromptInfo():
                return self._prompt(prompt * self._n, event)
            case End():
                self._usages.append(event.usage)
            case Admitted():
                self._head = self._head or _head(event.request_id, self._created, self._model)
        return b""

    def _chunk(self, index: int, event: Chunk) -> bytes:
        if not (event.logprobs or self._body.return_token_ids or self._so_far):
            return self._text(index, event.text) if event.text else b""
        if not (event.text or event.logprobs or self._body.return_token_ids):
            return b""
        choice: dict[str, Any] = {"index": index, "text": event.text, "logprobs": None, "finish_reason": None}
        if event.logprobs:
            choice["logprobs"] = self._logprobs(index, event.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = event.token_ids
        return self._send(choice)

    def _logprobs(
        self, index: int, tokens: tuple[TokenLogprob, ...], *, first: bool = False
    ) -> dict[str, Any]:
        made = of_completion(tokens, self._offsets.get(index, 0), first=first)
        self._offsets[index] = made["text_offset"][-1] + len(made["tokens"][-1])
        return made

    def _text(self, index: int, text: str) -> bytes:
        if index not in self._plain:
            choice = {"index": index, "logprobs": None, "finish_reason": None}
            self._plain[index] = PlainText(lambda text: self._send({**choice, "text": text}))
        return self._plain[index].event(text)

    def _end(self, index: int, event: ChoiceEnd) -> bytes:
        told = {"finish_reason": reason(event), "stop_reason": stop_reason(event)}
        return self._send({"index": index, "text": "", "logprobs": None, **told})

    def _prompt(self, first_index: int, event: PromptInfo) -> bytes:
        return b"".join(self._prompt_of(first_index + i, event) for i in range(self._n))

    def _prompt_of(self, index: int, event: PromptInfo) -> bytes:
        asked = self._body
        text = event.text if asked.echo else ""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if asked.echo and asked.logprobs is not None and event.logprobs:
            choice["logprobs"] = self._logprobs(index, event.logprobs, first=True)
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = of_prompt(event.logprobs)
        if asked.return_token_ids:
            choice["prompt_token_ids"] = event.token_ids
        return self._send(choice)

    def _send(self, choice: dict[str, Any]) -> bytes:
        counts = {} if self._so_far is None else {"usage": self._so_far.json()}
        return sse({**self._head, "choices": [choice], **counts})

    def finish(self) -> bytes:
        """See Reply."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        usage = usage_json(sum_usage(self._usages))
        return sse({**self._head, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    def failed(self, error: PdserveError) -> bytes:
        """See Reply."""
        return sse(openai_form(error)) + b"data: [DONE]\n\n"
