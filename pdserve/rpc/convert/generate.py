"""Generation as clients see it: requests and the events of their streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.api import (
    Admitted,
    ChatMessage,
    ChoiceEnd,
    Chunk,
    End,
    GenerateInput,
    PromptInfo,
    SamplingInput,
    StreamEvent,
    Timings,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
)
from pdserve.errors import InvalidRequest
from pdserve.rpc.convert.ledger import ledger_from_pb, ledger_to_pb
from pdserve.rpc.convert.values import (
    SAMPLING_FIELDS,
    finish_from_pb,
    finish_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    sampling_lists_from_pb,
    sampling_lists_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import FinishReason

_TOOL_MODES: Mapping[ToolMode, pb.ToolMode.ValueType] = {
    mode: pb.ToolMode.Value(f"TOOL_MODE_{mode.name}") for mode in ToolMode
}
_TOOL_MODES_BACK = {int(number): mode for mode, number in _TOOL_MODES.items()}
_PLAIN = (
    "model", "deadline_s", "priority", "client_request_id", "no_prefix_cache", "trace_id", "no_text",
    "resume_window_s", "n", "best_of", "beam_width", "echo",
)  # fmt: skip
_OPTIONAL = ("length_penalty", "prompt_logprobs", "thinking")
_TEXTS = ("stop", "bad_words")


def _sampling_to_pb(value: SamplingInput) -> common_pb2.Sampling:
    plain = {name: getattr(value, name) for name in SAMPLING_FIELDS}
    return common_pb2.Sampling(**plain, **sampling_lists_to_pb(value))


def _sampling_from_pb(message: common_pb2.Sampling) -> SamplingInput:
    return SamplingInput(**_optional(message, SAMPLING_FIELDS), **sampling_lists_from_pb(message))


def _optional(message: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(message, name) if message.HasField(name) else None for name in names}


def generate_to_pb(value: GenerateInput) -> pb.GenerateRequest:
    plain: dict[str, Any] = {name: getattr(value, name) for name in (*_PLAIN, *_OPTIONAL, *_TEXTS)}
    sampling, tools = _sampling_to_pb(value.sampling), tools_to_pb(value.tools)
    out = pb.GenerateRequest(**plain, sampling=sampling, tools=tools)
    if value.tool_choice is not None:
        choice = value.tool_choice
        out.tool_choice.CopyFrom(pb.ToolChoice(mode=_TOOL_MODES[choice.mode], name=choice.name))
    if value.messages is not None:
        out.chat.CopyFrom(messages_to_pb(value.messages))
    elif value.token_ids is not None:
        out.tokens.CopyFrom(common_pb2.TokenIds(ids=value.token_ids))
    elif value.prompt is not None:
        out.prompt = value.prompt
    return out


def generate_from_pb(message: pb.GenerateRequest) -> GenerateInput:
    """Raises InvalidRequest for values of enums that this version does not know; all else is for the router's
    validation to say."""
    which = message.WhichOneof("input")
    plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
    plain |= {name: tuple(getattr(message, name)) for name in _TEXTS}
    return GenerateInput(
        **plain,
        **_optional(message, _OPTIONAL),
        prompt=message.prompt if which == "prompt" else None,
        messages=messages_from_pb(message.chat) if which == "chat" else None,
        token_ids=tuple(message.tokens.ids) if which == "tokens" else None,
        sampling=_sampling_from_pb(message.sampling),
        tools=tools_from_pb(message.tools),
        tool_choice=_tool_choice(message.tool_choice) if message.HasField("tool_choice") else None,
    )


def _tool_choice(message: pb.ToolChoice) -> ToolChoice:
    mode = _TOOL_MODES_BACK.get(message.mode)
    if mode is None:
        raise InvalidRequest.field("tool_choice.mode", "is not set, or is a value this version does not know")
    return ToolChoice(mode=mode, name=message.name)


def messages_to_pb(values: tuple[ChatMessage, ...]) -> pb.ChatMessages:
    return pb.ChatMessages(
        messages=[
            pb.ChatMessage(
                role=m.role,
                content=m.content,
                tool_calls=[pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in m.tool_calls],
                tool_call_id=m.tool_call_id,
                reasoning=m.reasoning,
            )
            for m in values
        ]
    )


def messages_from_pb(message: pb.ChatMessages) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(
            role=m.role,
            content=m.content,
            tool_calls=tuple(ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in m.tool_calls),
            tool_call_id=m.tool_call_id,
            reasoning=m.reasoning,
        )
        for m in message.messages
    )


def tools_to_pb(values: tuple[Tool, ...]) -> list[pb.Tool]:
    return [pb.Tool(name=t.name, description=t.description, parameters=t.parameters) for t in values]


def tools_from_pb(messages: Any) -> tuple[Tool, ...]:
    return tuple(Tool(name=t.name, description=t.description, parameters=t.parameters) for t in messages)


def stream_event_to_pb(value: StreamEvent) -> pb.GenerateResponse:
    match value:
        case Chunk():
            return pb.GenerateResponse(chunk=_chunk_to_pb(value))
        case Admitted():
            admitted = pb.Admitted(
                request_id=value.request_id,
                client_request_id=value.client_request_id,
                prompt_tokens=value.prompt_tokens,
            )
            return pb.GenerateResponse(admitted=admitted)
        case PromptInfo():
            logprobs = map(logprob_to_pb, value.logprobs)
            info = pb.PromptInfo(token_ids=value.token_ids, text=value.text, logprobs=logprobs)
            return pb.GenerateResponse(prompt=info)
        case ChoiceEnd():
            return pb.GenerateResponse(choice_end=_choice_end_to_pb(value))
        case End():
            return pb.GenerateResponse(end=_end_to_pb(value))


def _chunk_to_pb(value: Chunk) -> pb.Chunk:
    out = pb.Chunk(index=value.index, token_ids=value.token_ids, text=value.text)
    if (
        value.choice or value.logprobs or value.reasoning or value.tool_calls
    ):  # the plain chunk is the hot one
        out.choice, out.reasoning = value.choice, value.reasoning
        out.logprobs.extend(map(logprob_to_pb, value.logprobs))
        for call in value.tool_calls:
            out.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    return out


def _choice_end_to_pb(value: ChoiceEnd) -> pb.ChoiceEnd:
    return pb.ChoiceEnd(
        choice=value.choice,
        finish_reason=finish_to_pb(value.finish_reason),
        completion_tokens=value.completion_tokens,
        stop_text=value.stop_text,
        stop_token_id=value.stop_token_id,
        cumulative_logprob=value.cumulative_logprob,
    )


def _end_to_pb(value: End) -> pb.End:
    timings = value.timings
    return pb.End(
        finish_reason=finish_to_pb(value.finish_reason),
        usage=usage_to_pb(value.usage),
        timings=pb.Timings(
            queue_s=timings.queue_s,
            tokenise_s=timings.tokenise_s,
            ttft_s=timings.ttft_s,
            total_s=timings.total_s,
        ),
        ledger=ledger_to_pb(value.ledger),
        epochs=value.epochs,
    )


def stream_event_from_pb(message: pb.GenerateResponse) -> StreamEvent:
    """Raises InvalidRequest for an event this version does not know."""
    match message.WhichOneof("event"):
        case "chunk":
            return _chunk_from_pb(message.chunk)
        case "admitted":
            admitted = message.admitted
            return Admitted(
                request_id=admitted.request_id,
                client_request_id=admitted.client_request_id,
                prompt_tokens=admitted.prompt_tokens,
            )
        case "prompt":
            info = message.prompt
            logprobs = tuple(map(logprob_from_pb, info.logprobs))
            return PromptInfo(token_ids=tuple(info.token_ids), text=info.text, logprobs=logprobs)
        case "choice_end":
            return _choice_end_from_pb(message.choice_end)
        case "end":
            return _end_from_pb(message.end)
        case _:
            raise InvalidRequest.field("event", "is not set")


def _chunk_from_pb(message: pb.Chunk) -> Chunk:
    return Chunk(
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        choice=message.choice,
        logprobs=tuple(map(logprob_from_pb, message.logprobs)),
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCallDelta(index=c.index, id=c.id, name=c.name, arguments=c.arguments)
            for c in message.tool_calls
        ),
    )


def _choice_end_from_pb(message: pb.ChoiceEnd) -> ChoiceEnd:
    return ChoiceEnd(
        choice=message.choice,
        finish_reason=_finish(message.finish_reason),
        completion_tokens=message.completion_tokens,
        stop_text=message.stop_text,
        **_optional(message, ("stop_token_id", "cumulative_logprob")),
    )


def _finish(number: int) -> FinishReason:
    finish = finish_from_pb(number)
    if finish is None:
        raise InvalidRequest.field("finish_reason", "is not set")
    return finish


def _end_from_pb(message: pb.End) -> End:
    timings = message.timings
    return End(
        finish_reason=_finish(message.finish_reason),
        usage=usage_from_pb(message.usage),
        timings=Timings(
            queue_s=timings.queue_s,
            tokenise_s=timings.tokenise_s,
            ttft_s=timings.ttft_s,
            total_s=timings.total_s,
        ),
        ledger=ledger_from_pb(message.ledger),
        epochs=message.epochs,
    )
