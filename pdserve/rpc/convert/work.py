"""Router ↔ worker: Reserve and its stream of events, Prefill and its result."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.errors import InvalidRequest
from pdserve.messages import Ended, Prefilled, PrefillRequest, Refusal, Refused, Reserve, Reserved, Token
from pdserve.rpc.convert.ledger import ledger_from_pb, ledger_to_pb
from pdserve.rpc.convert.records import peer_from_pb, peer_to_pb
from pdserve.rpc.convert.values import (
    finish_from_pb,
    finish_to_pb,
    key_from_pb,
    key_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    mode_from_pb,
    mode_to_pb,
    outcome_from_pb,
    outcome_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from pdserve.rpc.v1 import common_pb2, decode_pb2, prefill_pb2
from pdserve.types import HandoverMode, Key, SamplingParams

DecodeEvent = Reserved | Refused | Token | Ended
PrefillResult = Prefilled | Refused
MAX_DEADLINE_S = 86400.0


def reserve_to_pb(value: Reserve) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(
        key=key_to_pb(value.key),
        receiver_incarnation=value.receiver_incarnation,
        ticket=value.ticket,
        token_ids=value.token_ids,
        num_forced=value.num_forced,
        sampling=sampling_to_pb(value.sampling),
        tenant=value.tenant,
        mode=mode_to_pb(value.mode),
        prefill=None if value.prefill is None else peer_to_pb(value.prefill),
        deadline_s=value.deadline_s,
        priority=value.priority,
        use_prefix_cache=value.use_prefix_cache,
        trace_id=value.trace_id,
        cache_salt=value.cache_salt,
    )


def reserve_from_pb(message: decode_pb2.ReserveRequest) -> Reserve:
    """Raises InvalidRequest; also if the prefill peer does not fit the mode or num_forced the tokens."""
    mode = mode_from_pb(message.mode)
    if (mode is HandoverMode.LOCAL) == message.HasField("prefill"):
        raise InvalidRequest.field("prefill", "must be set in disaggregated mode and only there")
    return Reserve(
        key=key_from_pb(message.key),
        receiver_incarnation=message.receiver_incarnation,
        ticket=message.ticket,
        token_ids=_tokens(message.token_ids, message.num_forced),
        num_forced=message.num_forced,
        sampling=_sampling(message.sampling, message.num_forced),
        tenant=message.tenant,
        mode=mode,
        prefill=peer_from_pb(message.prefill) if message.HasField("prefill") else None,
        deadline_s=_deadline(message.deadline_s),
        priority=message.priority,
        use_prefix_cache=message.use_prefix_cache,
        trace_id=message.trace_id,
        cache_salt=message.cache_salt,
    )


def prefill_to_pb(value: PrefillRequest) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        key=key_to_pb(value.key),
        receiver_incarnation=value.receiver_incarnation,
        ticket=value.ticket,
        token_ids=value.token_ids,
        num_forced=value.num_forced,
        sampling=sampling_to_pb(value.sampling),
        tenant=value.tenant,
        decode=peer_to_pb(value.decode),
        deadline_s=value.deadline_s,
        priority=value.priority,
        use_prefix_cache=value.use_prefix_cache,
        trace_id=value.trace_id,
        cache_salt=value.cache_salt,
    )


def prefill_from_pb(message: prefill_pb2.PrefillRequest) -> PrefillRequest:
    """Raises InvalidRequest."""
    return PrefillRequest(
        key=key_from_pb(message.key),
        receiver_incarnation=message.receiver_incarnation,
        ticket=message.ticket,
        token_ids=_tokens(message.token_ids, message.num_forced),
        num_forced=message.num_forced,
        sampling=_sampling(message.sampling, message.num_forced),
        tenant=message.tenant,
        decode=peer_from_pb(message.decode),
        deadline_s=_deadline(message.deadline_s),
        priority=message.priority,
        use_prefix_cache=message.use_prefix_cache,
        trace_id=message.trace_id,
        cache_salt=message.cache_salt,
    )


def _deadline(seconds: float) -> float:
    if not 0 < seconds < MAX_DEADLINE_S:
        raise InvalidRequest.field("deadline_s", "must be a positive number of seconds")
    return seconds


def _sampling(message: common_pb2.Sampling, num_forced: int) -> SamplingParams:
    sampling = sampling_from_pb(message)
    if sampling.max_tokens <= num_forced:
        raise InvalidRequest.field("max_tokens", "must leave at least one token to make")
    return sampling


def _tokens(ids: Iterable[int], num_forced: int) -> tuple[int, ...]:
    tokens = tuple(ids)
    if num_forced >= len(tokens):
        raise InvalidRequest.field("token_ids", "must hold at least one prompt token before the forced ones")
    return tokens


def decode_event_to_pb(value: DecodeEvent) -> decode_pb2.ReserveResponse:
    """One message of D's stream."""
    key = key_to_pb(value.key)
    match value:
        case Token():
            return decode_pb2.ReserveResponse(key=key, token=_token_to_pb(value))
        case Reserved():
            reserved = decode_pb2.Reserved(mode=mode_to_pb(value.mode), hit_tokens=value.hit_tokens)
            return decode_pb2.ReserveResponse(key=key, reserved=reserved)
        case Refused():
            refused = decode_pb2.ReserveRefused(
                reason=value.reason.value, detail=value.detail, retry_after_s=value.retry_after_s
            )
            return decode_pb2.ReserveResponse(key=key, refused=refused)
        case Ended():
            return decode_pb2.ReserveResponse(key=key, ended=_ended_to_pb(value))


def decode_event_from_pb(message: decode_pb2.ReserveResponse) -> DecodeEvent:
    """Raises InvalidRequest for a message without an event this version knows."""
    key = key_from_pb(message.key)
    match message.WhichOneof("event"):
        case "token":
            return _token_from_pb(key, message.token)
        case "reserved":
            mode = mode_from_pb(message.reserved.mode)
            return Reserved(key=key, mode=mode, hit_tokens=message.reserved.hit_tokens)
        case "refused":
            return _refused(key, message.refused)
        case "ended":
            return _ended_from_pb(key, message.ended)
        case _:
            raise InvalidRequest.field("event", "is not set")


def _token_to_pb(value: Token) -> decode_pb2.TokenOut:
    ledger = None if value.ledger is None else ledger_to_pb(value.ledger)
    logprob = None if value.logprob is None else logprob_to_pb(value.logprob)
    return decode_pb2.TokenOut(index=value.index, token_id=value.token_id, ledger=ledger, logprob=logprob)


def _token_from_pb(key: Key, message: decode_pb2.TokenOut) -> Token:
    ledger = ledger_from_pb(message.ledger) if message.HasField("ledger") else None
    logprob = logprob_from_pb(message.logprob) if message.HasField("logprob") else None
    return Token(key=key, index=message.index, token_id=message.token_id, ledger=ledger, logprob=logprob)


def _ended_to_pb(value: Ended) -> decode_pb2.Ended:
    return decode_pb2.Ended(
        finish=finish_to_pb(value.finish),
        error_label=value.error_label,
        error_message=value.error_message,
        retryable=value.retryable,
        usage=usage_to_pb(value.usage),
        ledger=ledger_to_pb(value.ledger),
    )


def _ended_from_pb(key: Key, message: decode_pb2.Ended) -> Ended:
    finish = finish_from_pb(message.finish)
    if (finish is None) != bool(message.error_label):
        raise InvalidRequest.field("ended", "must have either a finish reason or an error label")
    return Ended(
        key=key,
        finish=finish,
        error_label=message.error_label,
        error_message=message.error_message,
        retryable=message.retryable,
        usage=usage_from_pb(message.usage),
        ledger=ledger_from_pb(message.ledger),
    )


def _refused(key: Key, message: decode_pb2.ReserveRefused | prefill_pb2.PrefillRefused) -> Refused:
    try:
        reason = Refusal(message.reason)
    except ValueError as error:
        raise InvalidRequest.field("refused.reason", "is not a reason this version knows") from error
    return Refused(key=key, reason=reason, detail=message.detail, retry_after_s=message.retry_after_s)


def prefill_result_to_pb(value: PrefillResult) -> prefill_pb2.PrefillResponse:
    key = key_to_pb(value.key)
    if isinstance(value, Refused):
        refused = prefill_pb2.PrefillRefused(
            reason=value.reason.value, detail=value.detail, retry_after_s=value.retry_after_s
        )
        return prefill_pb2.PrefillResponse(key=key, refused=refused)
    prefilled = prefill_pb2.Prefilled(
        outcome=outcome_to_pb(value.outcome), detail=value.detail, ledger=ledger_to_pb(value.ledger)
    )
    return prefill_pb2.PrefillResponse(key=key, prefilled=prefilled)


def prefill_result_from_pb(message: prefill_pb2.PrefillResponse) -> PrefillResult:
    """Raises InvalidRequest for a message without a result this version knows."""
    key = key_from_pb(message.key)
    match message.WhichOneof("result"):
        case "prefilled":
            done = message.prefilled
            outcome = outcome_from_pb(done.outcome)
            return Prefilled(key=key, outcome=outcome, detail=done.detail, ledger=ledger_from_pb(done.ledger))
        case "refused":
            return _refused(key, message.refused)
        case _:
            raise InvalidRequest.field("result", "is not set")
