"""The whole answer to one request, and collecting it from the events of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, PromptInfo, StreamEvent, Timings, ToolCall
from pdserve.errors import InternalError
from pdserve.types import FinishReason, Ledger, TokenLogprob, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer of a request. logprobs: one for each token, if asked for. reasoning, tool_calls: of a chat;
    neither is part of text. stop_text, stop_token_id: what ended it, if one did. cumulative_logprob: sum of
    its tokens' log-probabilities, where they were computed."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float | None = None
    stop_text: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished request. text, token_ids and finish_reason are those of its first choice. prompt: if the
    prompt or its log-probabilities were asked for. epochs: tries it took, 1 when nothing failed."""

    request_id: str
    client_request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    ledger: Ledger
    epochs: int
    choices: tuple[Choice, ...] = ()
    prompt: PromptInfo | None = None

    @property
    def reasoning(self) -> str:
        """What the first choice thought."""
        return self.choices[0].reasoning if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """What the first choice wants called."""
        return self.choices[0].tool_calls if self.choices else ()

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the first choice's tokens, if asked for."""
        return self.choices[0].logprobs if self.choices else ()


@dataclass(slots=True)
class _Part:
    """What has come of one choice."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    end: ChoiceEnd | None = None

    def take(self, chunk: Chunk) -> None:
        if chunk.index != len(self.ids) or self.end is not None:
            raise InternalError("The server's stream has a gap; please report this.")
        self.ids += chunk.token_ids
        self.text.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        self.logprobs += chunk.logprobs
        for delta in chunk.tool_calls:
            call = self.calls.get(delta.index, ToolCall(id=delta.id, name=delta.name, arguments=""))
            self.calls[delta.index] = replace(call, arguments=call.arguments + delta.arguments)

    def choice(self, index: int, finish: FinishReason) -> Choice:
        """finish: of a choice that got no end of its own."""
        end = self.end or ChoiceEnd(choice=index, finish_reason=finish)
        return Choice(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.ids),
            finish_reason=end.finish_reason,
            reasoning="".join(self.reasoning),
            tool_calls=tuple(call for _, call in sorted(self.calls.items())),
            logprobs=tuple(self.logprobs),
            cumulative_logprob=end.cumulative_logprob,
            stop_text=end.stop_text,
            stop_token_id=end.stop_token_id,
        )


@dataclass(slots=True)
class Collector:
    """Builds the result. Checks that no token is missing or comes twice."""

    admitted: Admitted | None = None
    prompt: PromptInfo | None = None
    end: End | None = None
    _parts: dict[int, _Part] = field(default_factory=dict)

    def take(self, event: StreamEvent) -> Chunk | None:
        """Takes the next event; returns it if it is a chunk. Raises InternalError for a gap in the stream."""
        match event:
            case Chunk():
                self._part(event.choice).take(event)
                return event
            case Admitted():
                self.admitted = event
            case PromptInfo():
                self.prompt = event
            case ChoiceEnd():
                self._part(event.choice).end = event
            case End():
                self.end = event
        return None

    def _part(self, choice: int) -> _Part:
        return self._parts.setdefault(choice, _Part())

    def result(self) -> Result:
        """The result of a stream that ended. Raises InternalError if the server closed it without an end."""
        if self.admitted is None or self.end is None:
            raise InternalError("The server closed the stream without a result; please report this.")
        first = self._part(0)
        if any(part.end is None for part in self._parts.values() if part is not first):
            raise InternalError("The server closed the stream before all choices ended; please report this.")
        finish = self.end.finish_reason
        choices = tuple(part.choice(index, finish) for index, part in sorted(self._parts.items()))
        return Result(
            request_id=self.admitted.request_id,
            client_request_id=self.admitted.client_request_id,
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            finish_reason=choices[0].finish_reason,
            usage=self.end.usage,
            timings=self.end.timings,
            ledger=self.end.ledger,
            epochs=self.end.epochs,
            choices=choices,
            prompt=self.prompt,
        )
