"""Membership: the events of a worker's Join stream, the router's answers, and a worker's own status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from pdserve.errors import InvalidRequest
from pdserve.messages import Report
from pdserve.rpc.convert.ledger import ledger_from_pb, ledger_to_pb
from pdserve.rpc.convert.records import (
    load_from_pb,
    load_to_pb,
    worker_record_from_pb,
    worker_record_to_pb,
)
from pdserve.rpc.v1 import cluster_pb2 as pb
from pdserve.types import ClockSample, WorkerLoad, WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """First message of a Join stream. monotonic_s: the worker's own monotonic clock."""

    record: WorkerRecord
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent regularly after Register. monotonic_s: the worker's own monotonic clock. sample: the round trip of
    an earlier message, if it was answered since the last heartbeat."""

    load: WorkerLoad
    monotonic_s: float
    sample: ClockSample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The worker goes on purpose."""

    reason: str = ""


JoinEvent = Register | Heartbeat | Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """Answer to Register and heartbeats. problem: why the worker was not accepted.

    echo_s: monotonic_s of what it answers. received_s, replied_s: the router's clock when that came, and now.
    """

    router_id: str
    accepted: bool
    problem: str = ""
    echo_s: float = 0.0
    received_s: float = 0.0
    replied_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What GetWorkerStatus tells. integrity_problem: result of check_integrity(), empty when all is well.

    live: keys that are not done; closing: those of them that only wait for quiet. counters: since the start
    of this incarnation.
    """

    record: WorkerRecord
    load: WorkerLoad
    integrity_problem: str
    idle: bool
    live: int = 0
    closing: int = 0
    tombstones: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)


def join_event_to_pb(value: JoinEvent) -> pb.JoinRequest:
    match value:
        case Heartbeat():
            sample = None if value.sample is None else pb.ClockSample(**asdict(value.sample))
            beat = pb.Heartbeat(load=load_to_pb(value.load), monotonic_s=value.monotonic_s, sample=sample)
            return pb.JoinRequest(heartbeat=beat)
        case Register():
            register = pb.Register(record=worker_record_to_pb(value.record), monotonic_s=value.monotonic_s)
            return pb.JoinRequest(register=register)
        case Leave():
            return pb.JoinRequest(leave=pb.Leave(reason=value.reason))


def join_event_from_pb(message: pb.JoinRequest) -> JoinEvent:
    """Raises InvalidRequest."""
    match message.WhichOneof("event"):
        case "heartbeat":
            beat = message.heartbeat
            sample = _sample_from_pb(beat.sample) if beat.HasField("sample") else None
            return Heartbeat(load=load_from_pb(beat.load), monotonic_s=beat.monotonic_s, sample=sample)
        case "register":
            register = message.register
            return Register(record=worker_record_from_pb(register.record), monotonic_s=register.monotonic_s)
        case "leave":
            return Leave(reason=message.leave.reason)
        case _:
            raise InvalidRequest.field("event", "is not set")


def _sample_from_pb(message: pb.ClockSample) -> ClockSample:
    return ClockSample(**{f.name: getattr(message, f.name) for f in fields(ClockSample)})


def join_answer_to_pb(value: JoinAnswer) -> pb.JoinResponse:
    return pb.JoinResponse(**asdict(value))


def join_answer_from_pb(message: pb.JoinResponse) -> JoinAnswer:
    return JoinAnswer(**{f.name: getattr(message, f.name) for f in fields(JoinAnswer)})


def report_to_pb(value: Report | None) -> pb.GetRequestResponse:
    """None: the key does not live there."""
    if value is None:
        return pb.GetRequestResponse()
    return pb.GetRequestResponse(known=True, doing=value.doing, ledger=ledger_to_pb(value.ledger))


def report_from_pb(message: pb.GetRequestResponse) -> Report | None:
    """Raises InvalidRequest."""
    if not message.known:
        return None
    return Report(doing=message.doing, ledger=ledger_from_pb(message.ledger))


def worker_state_to_pb(value: WorkerState) -> pb.GetWorkerStatusResponse:
    return pb.GetWorkerStatusResponse(
        record=worker_record_to_pb(value.record),
        load=load_to_pb(value.load),
        integrity_problem=value.integrity_problem,
        idle=value.idle,
        live=value.live,
        closing=value.closing,
        tombstones=value.tombstones,
        counters=value.counters,
    )


def worker_state_from_pb(message: pb.GetWorkerStatusResponse) -> WorkerState:
    """Raises InvalidRequest."""
    return WorkerState(
        record=worker_record_from_pb(message.record),
        load=load_from_pb(message.load),
        integrity_problem=message.integrity_problem,
        idle=message.idle,
        live=message.live,
        closing=message.closing,
        tombstones=message.tombstones,
        counters=dict(message.counters),
    )
