"""Small values: keys, enums, sampling and usage. Every other convert module builds on these."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from pdserve.api import SamplingInput
from pdserve.errors import InvalidRequest
from pdserve.messages import Outcome
from pdserve.rpc.v1 import common_pb2 as pb
from pdserve.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    HandoverMode,
    Key,
    Role,
    SamplingParams,
    TokenLogprob,
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

_GRAMMAR: Mapping[GrammarKind, pb.GrammarKind.ValueType] = {
    kind: pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind
}


def _inverse(table: Mapping[E, V]) -> dict[int, E]:
    return {int(number): value for value, number in table.items()}


_FINISH_BACK = _inverse(_FINISH)
_MODE_BACK = _inverse(_MODE)
_ROLE_BACK = _inverse(_ROLE)
_OUTCOME_BACK = _inverse(_OUTCOME)
_GRAMMAR_BACK = _inverse(_GRAMMAR)


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


SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_tokens",
)  # fmt: skip
"""Those that a client may leave out and that are always set between our processes."""


def sampling_lists_to_pb(value: SamplingParams | SamplingInput) -> dict[str, Any]:
    """The fields of a Sampling that are the same for clients and between our processes."""
    grammar = value.grammar
    return {
        "stop_token_ids": value.stop_token_ids,
        "ignore_eos": value.ignore_eos,
        "logit_bias": [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in value.logit_bias],
        "bad_words": [pb.TokenIds(ids=word) for word in value.bad_words],
        "logprobs": value.logprobs,
        "grammar": None if grammar is None else pb.Grammar(kind=_GRAMMAR[grammar.kind], text=grammar.text),
    }


def sampling_lists_from_pb(message: pb.Sampling) -> dict[str, Any]:
    """The other way. Raises InvalidRequest for an unknown kind of grammar."""
    grammar = None
    if message.HasField("grammar"):
        kind = _named(_GRAMMAR_BACK, message.grammar.kind, "sampling.grammar.kind")
        grammar = Grammar(kind=kind, text=message.grammar.text)
    return {
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "logit_bias": tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        "bad_words": tuple(tuple(word.ids) for word in message.bad_words),
        "logprobs": message.logprobs if message.HasField("logprobs") else None,
        "grammar": grammar,
    }


def logprob_to_pb(value: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=value.token_id,
        logprob=value.logprob,
        token=value.token,
        top=[
            pb.TokenLogprob(token_id=other.token_id, logprob=other.logprob, token=other.token)
            for other in value.top
        ],
    )


def logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    """Alternatives of alternatives are not read."""
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        token=message.token,
        top=tuple(
            TokenLogprob(token_id=other.token_id, logprob=other.logprob, token=other.token)
            for other in message.top
        ),
    )


def sampling_to_pb(value: SamplingParams) -> pb.Sampling:
    """All fields are set: between our processes nothing takes a default."""
    plain = {name: getattr(value, name) for name in SAMPLING_FIELDS}
    return pb.Sampling(**plain, **sampling_lists_to_pb(value))


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Raises InvalidRequest if a field is not set: the router sets them all."""
    for name in SAMPLING_FIELDS:
        if not message.HasField(name):  # type: ignore[arg-type]
            raise InvalidRequest.field(f"sampling.{name}", "is not set")
    plain = {name: getattr(message, name) for name in SAMPLING_FIELDS}
    return SamplingParams(**plain, **sampling_lists_from_pb(message))


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
