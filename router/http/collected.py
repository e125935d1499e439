"""What a run gave, by choice, once it is over; and token counts and reasons in the words of OpenAI.

What does not live here: bodies and chunks of an API (`completions`, `chat`, `responses`, `messages`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, PromptInfo, StreamEvent, ToolCall, ToolCallDelta
from pdserve.errors import PdserveError
from pdserve.types import FinishReason, TokenLogprob, Usage
from router.http.strict_json import dump

_RUNNING = ChoiceEnd(choice=0, finish_reason=FinishReason.STOP)


@dataclass(slots=True)
class Choice:
    """One choice as far as it has come."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    end: ChoiceEnd = _RUNNING

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    def tool_calls(self) -> list[ToolCall]:
        """Its calls, each put together from its parts."""
        parts: dict[int, list[ToolCallDelta]] = {}
        for delta in self.calls:
            parts.setdefault(delta.index, []).append(delta)
        return [
            ToolCall(id=some[0].id, name=some[0].name, arguments="".join(part.arguments for part in some))
            for _, some in sorted(parts.items())
        ]


@dataclass(slots=True)
class Collected:
    """One prompt's run. usage: of all its choices."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt: PromptInfo | None = None
    usage: Usage = Usage()

    def add(self, event: StreamEvent) -> None:
        """Takes the next event."""
        match event:
            case Chunk():
                choice = self.choices.setdefault(event.choice, Choice())
                choice.texts.append(event.text)
                choice.token_ids.extend(event.token_ids)
                choice.logprobs.extend(event.logprobs)
                choice.reasoning.append(event.reasoning)
                choice.calls.extend(event.tool_calls)
            case ChoiceEnd():
                self.choices.setdefault(event.choice, Choice()).end = event
            case PromptInfo():
                self.prompt = event
            case End():
                self.usage = event.usage
            case Admitted():
                pass


class Whole(ABC):
    """A Reply of one JSON body, made of all prompts' runs."""

    streams = False

    def __init__(self, num_prompts: int = 1) -> None:
        self.request_id = ""
        self.prompts = [Collected() for _ in range(num_prompts)]

    def feed(self, prompt: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if isinstance(event, Admitted):
            self.request_id = self.request_id or event.request_id
        self.prompts[prompt].add(event)
        return b""

    def finish(self) -> bytes:
        """See Reply."""
        return dump(self.body())

    def failed(self, error: PdserveError) -> bytes:
        """See Reply; never called: nothing is sent before the end."""
        raise error

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The whole body; all events have come."""


class SoFar:
    """Token counts of a stream under way."""

    def __init__(self) -> None:
        self._prompt = self._completion = 0

    def add(self, event: StreamEvent) -> None:
        """Takes the next event."""
        if isinstance(event, Chunk):
            self._completion += len(event.token_ids)
        elif isinstance(event, Admitted):
            self._prompt += event.prompt_tokens

    def json(self) -> dict[str, Any]:
        """As in a usage chunk."""
        return usage_json(Usage(prompt_tokens=self._prompt, completion_tokens=self._completion))


def sum_usage(all_of_them: list[Usage]) -> Usage:
    """Counts of several prompts together."""
    return Usage(
        prompt_tokens=sum(one.prompt_tokens for one in all_of_them),
        cached_tokens=sum(one.cached_tokens for one in all_of_them),
        completion_tokens=sum(one.completion_tokens for one in all_of_them),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts as completions and chats tell them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def reason(end: ChoiceEnd) -> str:
    """Why a choice ended."""
    return "length" if end.finish_reason is FinishReason.LENGTH else "stop"


def stop_reason(end: ChoiceEnd) -> str | int | None:
    """The text or the token that ended it, as vLLM tells it."""
    return end.stop_text or end.stop_token_id


def parts(chunk: Chunk) -> Iterator[tuple[str, int, str, ToolCallDelta | None]]:
    """What a chunk brings, in order: (kind, number of the call, text, part of a call). kind: "reasoning",
    "text" or "call"."""
    if chunk.reasoning:
        yield "reasoning", 0, chunk.reasoning, None
    if chunk.text:
        yield "text", 0, chunk.text, None
    for delta in chunk.tool_calls:
        yield "call", delta.index, delta.arguments, delta
