"""Small values: keys, enums, sampling and usage. Every other convert module builds on these."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from pdserve.errors import InvalidRequest
from pdserve.messages import Outcome
from pdserve.rpc.v1 import common_pb2 as pb
from pdserve.types import (
    FinishReason,
    HandoverMode,
    Key,
    Role,
    SamplingParams,
    Usage,
)

E = TypeVar("E", bound=StrEnum)
V = TypeVar("V", bound=int)

_FINISH: Mapping[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_MODE: Mapping[HandoverMode, pb.HandoverMode.ValueType] = {
    HandoverMode.DISAGGREGATED: pb.HANDOVER_MODE_DISAGGREGATED,
    HandoverMode.LOCAL: pb.HANDOVER_MODE_LOCAL,
}
_ROLE: Mapping[Role, pb.Role.ValueType] = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.AGGREGATED: pb.ROLE_AGGREGATED,
}
_OUTCOME: Mapping[Outcome, pb.Outcome.ValueType] = {
    outcome: pb.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome
}


def _inverse(table: Mapping[E, V]) -> dict[int, E]:
    return {int(number): value for value, number in table.items()}


_FINISH_BACK = _inverse(_FINISH)
_MODE_BACK = _inverse(_MODE)
_ROLE_BACK = _inverse(_ROLE)
_OUTCOME_BACK = _inverse(_OUTCOME)


def _named(table: Mapping[int, E], number: int, field: str) -> E:
    found = table.get(number)
    if found is None:
        raise InvalidRequest.field(field, "is not set, or is a value this version does not know")
    return found


def finish_to_pb(value: FinishReason | None) -> pb.FinishReason.ValueType:
    """None becomes UNSPECIFIED."""
    return pb.FINISH_REASON_UNSPECIFIED if value is None else _FINISH[value]


def finish_from_pb(number: int) -> FinishReason | None:
    """UNSPECIFIED becomes None. Raises InvalidRequest for an unknown number."""
    return None if number == 0 else _named(_FINISH_BACK, number, "finish")


def mode_to_pb(value: HandoverMode) -> pb.HandoverMode.ValueType:
    return _MODE[value]


def mode_from_pb(number: int) -> HandoverMode:
    """Raises InvalidRequest if not set or unknown; so do the other `*_from_pb` of enums."""
    return _named(_MODE_BACK, number, "mode")


def role_to_pb(value: Role) -> pb.Role.ValueType:
    return _ROLE[value]


def role_from_pb(number: int) -> Role:
    return _named(_ROLE_BACK, number, "role")


def outcome_to_pb(value: Outcome) -> pb.Outcome.ValueType:
    return _OUTCOME[value]


def outcome_from_pb(number: int) -> Outcome:
    return _named(_OUTCOME_BACK, number, "outcome")


def key_to_pb(key: Key) -> pb.Key:
    return pb.Key(request_id=key.request_id, term=key.term, epoch=key.epoch)


def key_from_pb(message: pb.Key) -> Key:
    """Raises InvalidRequest for a key without a request id."""
    if not message.request_id:
        raise InvalidRequest.field("key.request_id", "is empty")
    return Key(request_id=message.request_id, term=message.term, epoch=message.epoch)


def sampling_to_pb(value: SamplingParams) -> pb.Sampling:
    """All fields are set: between our processes nothing takes a default."""
    return pb.Sampling(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        min_p=value.min_p,
        seed=value.seed,
        max_tokens=value.max_tokens,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
    )


_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Raises InvalidRequest if a field is not set: the router sets them all."""
    for name in _SAMPLING_FIELDS:
        if not message.HasField(name):  # type: ignore[arg-type]
            raise InvalidRequest.field(f"sampling.{name}", "is not set")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def usage_to_pb(value: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=value.prompt_tokens,
        cached_tokens=value.cached_tokens,
        completion_tokens=value.completion_tokens,
    )


def usage_from_pb(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
    )
