"""The client API: requests, stream events, model information and fleet status."""

from __future__ import annotations

from dataclasses import fields

from pdserve.api import (
    Admitted,
    ChatMessage,
    Chunk,
    End,
    Explanation,
    FleetStatus,
    GenerateInput,
    ModelInfo,
    SamplingInput,
    StreamEvent,
    Timings,
    WorkerStatus,
)
from pdserve.errors import InvalidRequest
from pdserve.rpc.convert.ledger import ledger_from_pb, ledger_to_pb
from pdserve.rpc.convert.records import (
    limits_from_pb,
    limits_to_pb,
    load_from_pb,
    load_to_pb,
    worker_record_from_pb,
    worker_record_to_pb,
)
from pdserve.rpc.convert.values import (
    finish_from_pb,
    finish_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb

_OPTIONAL = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


def _sampling_to_pb(value: SamplingInput) -> common_pb2.Sampling:
    plain = {name: getattr(value, name) for name in _OPTIONAL}
    return common_pb2.Sampling(**plain, stop_token_ids=value.stop_token_ids, ignore_eos=value.ignore_eos)


def _sampling_from_pb(message: common_pb2.Sampling) -> SamplingInput:
    plain = {
        name: getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]
        for name in _OPTIONAL
    }
    return SamplingInput(**plain, stop_token_ids=tuple(message.stop_token_ids), ignore_eos=message.ignore_eos)


def generate_to_pb(value: GenerateInput) -> pb.GenerateRequest:
    out = pb.GenerateRequest(
        model=value.model,
        sampling=_sampling_to_pb(value.sampling),
        stop=value.stop,
        deadline_s=value.deadline_s,
        priority=value.priority,
        client_request_id=value.client_request_id,
        no_prefix_cache=value.no_prefix_cache,
        trace_id=value.trace_id,
        no_text=value.no_text,
        resume_window_s=value.resume_window_s,
        n=value.n,
    )
    if value.messages is not None:
        messages = [pb.ChatMessage(role=m.role, content=m.content) for m in value.messages]
        out.chat.CopyFrom(pb.ChatMessages(messages=messages))
    elif value.token_ids is not None:
        out.tokens.CopyFrom(pb.TokenIds(ids=value.token_ids))
    elif value.prompt is not None:
        out.prompt = value.prompt
    return out


def generate_from_pb(message: pb.GenerateRequest) -> GenerateInput:
    """Never fails: what is wrong with the values is for the router's validation to say."""
    which = message.WhichOneof("input")
    messages = tuple(ChatMessage(role=m.role, content=m.content) for m in message.chat.messages)
    return GenerateInput(
        model=message.model,
        prompt=message.prompt if which == "prompt" else None,
        messages=messages if which == "chat" else None,
        token_ids=tuple(message.tokens.ids) if which == "tokens" else None,
        sampling=_sampling_from_pb(message.sampling),
        stop=tuple(message.stop),
        deadline_s=message.deadline_s,
        priority=message.priority,
        client_request_id=message.client_request_id,
        no_prefix_cache=message.no_prefix_cache,
        trace_id=message.trace_id,
        no_text=message.no_text,
        resume_window_s=message.resume_window_s,
        n=message.n,
    )


def stream_event_to_pb(value: StreamEvent) -> pb.GenerateResponse:
    match value:
        case Chunk():
            chunk = pb.Chunk(index=value.index, token_ids=value.token_ids, text=value.text)
            return pb.GenerateResponse(chunk=chunk)
        case Admitted():
            admitted = pb.Admitted(
                request_id=value.request_id,
                client_request_id=value.client_request_id,
                prompt_tokens=value.prompt_tokens,
            )
            return pb.GenerateResponse(admitted=admitted)
        case End():
            return pb.GenerateResponse(end=_end_to_pb(value))


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
            chunk = message.chunk
            return Chunk(index=chunk.index, token_ids=tuple(chunk.token_ids), text=chunk.text)
        case "admitted":
            admitted = message.admitted
            return Admitted(
                request_id=admitted.request_id,
                client_request_id=admitted.client_request_id,
                prompt_tokens=admitted.prompt_tokens,
            )
        case "end":
            return _end_from_pb(message.end)
        case _:
            raise InvalidRequest.field("event", "is not set")


def _end_from_pb(message: pb.End) -> End:
    finish = finish_from_pb(message.finish_reason)
    if finish is None:
        raise InvalidRequest.field("finish_reason", "is not set")
    timings = message.timings
    return End(
        finish_reason=finish,
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


def model_info_to_pb(value: ModelInfo) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model=value.model,
        limits=limits_to_pb(value.limits),
        has_chat_template=value.has_chat_template,
        dtype=value.dtype,
        model_digest=value.model_digest,
    )


def model_info_from_pb(message: pb.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        limits=limits_from_pb(message.limits),
        has_chat_template=message.has_chat_template,
        dtype=message.dtype,
        model_digest=message.model_digest,
    )


def _worker_status_to_pb(value: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        record=worker_record_to_pb(value.record),
        load=load_to_pb(value.load),
        outstanding_tokens=value.outstanding_tokens,
        outstanding_requests=value.outstanding_requests,
        heartbeat_age_s=value.heartbeat_age_s,
        suspect=value.suspect,
    )


def _worker_status_from_pb(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        record=worker_record_from_pb(message.record),
        load=load_from_pb(message.load),
        outstanding_tokens=message.outstanding_tokens,
        outstanding_requests=message.outstanding_requests,
        heartbeat_age_s=message.heartbeat_age_s,
        suspect=message.suspect,
    )


_EXPLAINED = tuple(f.name for f in fields(Explanation) if f.name not in ("usage", "ledger"))


def explanation_to_pb(value: Explanation) -> pb.ExplainResponse:
    plain = {name: getattr(value, name) for name in _EXPLAINED}
    return pb.ExplainResponse(**plain, usage=usage_to_pb(value.usage), ledger=ledger_to_pb(value.ledger))


def explanation_from_pb(message: pb.ExplainResponse) -> Explanation:
    """Raises InvalidRequest."""
    plain = {name: getattr(message, name) for name in _EXPLAINED}
    return Explanation(**plain, usage=usage_from_pb(message.usage), ledger=ledger_from_pb(message.ledger))


def fleet_status_to_pb(value: FleetStatus) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        router_id=value.router_id,
        workers=[_worker_status_to_pb(worker) for worker in value.workers],
        queued=value.queued,
        running=value.running,
        uptime_s=value.uptime_s,
        draining=value.draining,
        pairing_problems=value.pairing_problems,
    )


def fleet_status_from_pb(message: pb.GetStatusResponse) -> FleetStatus:
    return FleetStatus(
        router_id=message.router_id,
        workers=tuple(_worker_status_from_pb(worker) for worker in message.workers),
        queued=message.queued,
        running=message.running,
        uptime_s=message.uptime_s,
        draining=message.draining,
        pairing_problems=tuple(message.pairing_problems),
    )
