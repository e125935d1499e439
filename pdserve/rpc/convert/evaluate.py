"""Router ↔ worker: Evaluate."""

from __future__ import annotations

from pdserve.errors import InvalidRequest
from pdserve.messages import Evaluate, Evaluated, EvaluateParams
from pdserve.rpc.convert.texts import pooling_from_pb, pooling_to_pb
from pdserve.rpc.convert.values import logprob_from_pb, logprob_to_pb
from pdserve.rpc.v1 import evaluate_pb2 as pb
from pdserve.rpc.v1 import inference_pb2 as pb_api

MAX_TOP = 20


def evaluate_to_pb(value: Evaluate) -> pb.EvaluateRequest:
    params = value.params
    return pb.EvaluateRequest(
        receiver_incarnation=value.receiver_incarnation,
        token_ids=value.token_ids,
        tenant=value.tenant,
        logprobs=params.num_top,
        from_index=params.from_index,
        pooling=pooling_to_pb(params.pooling) if params.pooling else pb_api.POOLING_UNSPECIFIED,
        priority=value.priority,
        no_prefix_cache=not value.use_prefix_cache,
        cache_salt=value.cache_salt,
    )


def evaluate_from_pb(message: pb.EvaluateRequest) -> Evaluate:
    """Raises InvalidRequest: no tokens, not one of logprobs and pooling, from_index outside the tokens."""
    num_tokens, wants_logprobs = len(message.token_ids), message.HasField("logprobs")
    if not num_tokens:
        raise InvalidRequest.field("token_ids", "is empty")
    if wants_logprobs == bool(message.pooling):
        raise InvalidRequest.field("logprobs", "exactly one of it and pooling must be set")
    if wants_logprobs and not 1 <= message.from_index < num_tokens:
        raise InvalidRequest.field("from_index", "must be at least 1 and within the tokens")
    if message.logprobs > MAX_TOP:
        raise InvalidRequest.field("logprobs", f"must be {MAX_TOP} at most")
    return Evaluate(
        receiver_incarnation=message.receiver_incarnation,
        token_ids=tuple(message.token_ids),
        tenant=message.tenant,
        params=EvaluateParams(
            num_top=message.logprobs if wants_logprobs else None,
            from_index=message.from_index,
            pooling=pooling_from_pb(message.pooling) if message.pooling else None,
        ),
        priority=message.priority,
        use_prefix_cache=not message.no_prefix_cache,
        cache_salt=message.cache_salt,
    )


def evaluated_to_pb(value: Evaluated) -> pb.EvaluateResponse:
    return pb.EvaluateResponse(
        logprobs=map(logprob_to_pb, value.logprobs), vector=value.vector, cached_tokens=value.cached_tokens
    )


def evaluated_from_pb(message: pb.EvaluateResponse) -> Evaluated:
    return Evaluated(
        logprobs=tuple(map(logprob_from_pb, message.logprobs)),
        vector=tuple(message.vector),
        cached_tokens=message.cached_tokens,
    )
