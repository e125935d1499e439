"""What clients ask of a router besides generation: its model, its fleet, one request's time."""

from __future__ import annotations

from dataclasses import fields

from pdserve.api import (
    Explanation,
    FleetStatus,
    ModelInfo,
    SecondsHistogram,
    Traffic,
    WorkerStatus,
)
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
    usage_from_pb,
    usage_to_pb,
)
from pdserve.rpc.v1 import inference_pb2 as pb


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
    plain = {name: getattr(message, name) for name in _EXPLAINED} | {"choice_ids": tuple(message.choice_ids)}
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
        traffic=_traffic_to_pb(value.traffic),
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
        traffic=_traffic_from_pb(message.traffic),
    )


_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "finished_requests", "failed_requests")


def _traffic_to_pb(value: Traffic) -> pb.Traffic:
    plain = {name: getattr(value, name) for name in _COUNTS}
    return pb.Traffic(**plain, ttft=_seconds_to_pb(value.ttft), itl=_seconds_to_pb(value.itl))


def _traffic_from_pb(message: pb.Traffic) -> Traffic:
    plain = {name: getattr(message, name) for name in _COUNTS}
    return Traffic(**plain, ttft=_seconds_from_pb(message.ttft), itl=_seconds_from_pb(message.itl))


def _seconds_to_pb(value: SecondsHistogram) -> pb.SecondsHistogram:
    return pb.SecondsHistogram(bounds=value.bounds, counts=value.counts, sum=value.sum)


def _seconds_from_pb(message: pb.SecondsHistogram) -> SecondsHistogram:
    return SecondsHistogram(bounds=tuple(message.bounds), counts=tuple(message.counts), sum=message.sum)
