"""Answers of a fake server as the events of a stream. See `pdserve.client.testing`.

There is no model: a text's token ids are its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pdserve.api import (
    Admitted,
    ChatMessage,
    ChoiceEnd,
    Chunk,
    End,
    FleetStatus,
    GenerateInput,
    ModelInfo,
    PromptInfo,
    StreamEvent,
    Timings,
    ToolCall,
    ToolCallDelta,
)
from pdserve.errors import PdserveError
from pdserve.types import FinishReason, ModelLimits, TokenLogprob, Usage

CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeAnswer:
    """What to answer. token_ids None: the bytes of text. chunks: it comes in so many. error: in place of
    the end, after all chunks. Each of n choices gets the same."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    chunks: int = 1
    error: PdserveError | None = None


Script = str | FakeAnswer | Callable[[GenerateInput], Iterable[StreamEvent]]


def prompt_ids(source: GenerateInput) -> tuple[int, ...]:
    """Token ids of what was asked."""
    if source.token_ids is not None:
        return source.token_ids
    if source.messages is not None:
        return tuple(chat_text(source.messages).encode())
    return tuple((source.prompt or "").encode())


def chat_text(messages: Iterable[ChatMessage]) -> str:
    """A conversation as plain text."""
    return "".join(f"{message.role}: {message.content}\n" for message in messages)


def odds(token_id: int) -> TokenLogprob:
    """A log-probability, the same for all tokens."""
    return TokenLogprob(token_id=token_id, logprob=-0.5, token=bytes((token_id & 255,)))


def events(script: Script, source: GenerateInput, request_id: str) -> Iterator[StreamEvent]:
    """The events of one request, admitted first. Raises the error of the script."""
    ids = prompt_ids(source)
    yield Admitted(request_id=request_id, client_request_id=source.client_request_id, prompt_tokens=len(ids))
    if callable(script):
        yield from script(source)
        return
    answer = FakeAnswer(text=script) if isinstance(script, str) else script
    if source.echo or source.prompt_logprobs is not None:
        logprobs = () if source.prompt_logprobs is None else tuple(map(odds, ids))
        yield PromptInfo(token_ids=ids, text=source.prompt or "", logprobs=logprobs)
    num_choices = max(source.n, 1)
    for choice in range(num_choices):
        yield from _chunks(answer, source, choice)
    if answer.error is not None:
        raise answer.error
    made = len(_ids(answer))
    for choice in range(num_choices):
        yield ChoiceEnd(choice=choice, finish_reason=answer.finish_reason, completion_tokens=made)
    usage = Usage(prompt_tokens=len(ids), completion_tokens=made * num_choices)
    yield End(finish_reason=answer.finish_reason, usage=usage, timings=Timings(ttft_s=0.01, total_s=0.02))


def _ids(answer: FakeAnswer) -> tuple[int, ...]:
    return tuple(answer.text.encode()) if answer.token_ids is None else answer.token_ids


def _chunks(answer: FakeAnswer, source: GenerateInput, choice: int) -> Iterator[Chunk]:
    """The answer in pieces of equal length, whatever is left in the last; reasoning first, calls last."""
    ids, text, count = _ids(answer), answer.text, max(answer.chunks, 1)
    calls = tuple(
        ToolCallDelta(index=at, id=call.id, name=call.name, arguments=call.arguments)
        for at, call in enumerate(answer.tool_calls)
    )
    for at in range(count):
        low, high = at * len(ids) // count, (at + 1) * len(ids) // count
        begin, end = at * len(text) // count, (at + 1) * len(text) // count
        yield Chunk(
            index=low,
            token_ids=ids[low:high],
            text="" if source.no_text else text[begin:end],
            choice=choice,
            logprobs=() if source.sampling.logprobs is None else tuple(map(odds, ids[low:high])),
            reasoning=answer.reasoning if at == 0 else "",
            tool_calls=calls if at == count - 1 else (),
        )


def model_info(model: str) -> ModelInfo:
    """The fake's model."""
    limits = ModelLimits(vocab_size=256, max_context=CONTEXT, end_token_ids=(), bos_token_id=None)
    return ModelInfo(model=model, limits=limits, has_chat_template=True, dtype="float32", model_digest="")


def fleet_status() -> FleetStatus:
    """A fleet without workers."""
    return FleetStatus(
        router_id="fake", workers=(), queued=0, running=0, uptime_s=0.0, draining=False, pairing_problems=()
    )
