"""Tokenising, vectors and scores of texts, as clients ask for them."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.api import (
    ContinuationScore,
    Embeddings,
    EmbedInput,
    ScoreInput,
    Scores,
    TextOrTokens,
    Tokenized,
    TokenizeInput,
)
from pdserve.errors import InvalidRequest
from pdserve.rpc.convert.generate import messages_from_pb, messages_to_pb, tools_from_pb, tools_to_pb
from pdserve.rpc.convert.values import logprob_from_pb, logprob_to_pb, usage_from_pb, usage_to_pb
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.types import Pooling

_POOLING: Mapping[Pooling, pb.Pooling.ValueType] = {p: pb.Pooling.Value(f"POOLING_{p.name}") for p in Pooling}
_POOLING_BACK = {0: Pooling.MEAN} | {int(number): pooling for pooling, number in _POOLING.items()}


def _text_to_pb(value: TextOrTokens) -> pb.TextOrTokens:
    if isinstance(value, str):
        return pb.TextOrTokens(text=value)
    return pb.TextOrTokens(tokens=common_pb2.TokenIds(ids=value))


def _text_from_pb(message: pb.TextOrTokens, name: str) -> TextOrTokens:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "tokens":
            return tuple(message.tokens.ids)
        case _:
            raise InvalidRequest.field(name, "needs a text or token ids.")


def pooling_to_pb(value: Pooling) -> pb.Pooling.ValueType:
    return _POOLING[value]


def pooling_from_pb(number: int) -> Pooling:
    """0 is the default. Raises InvalidRequest for an unknown number."""
    pooling = _POOLING_BACK.get(number)
    if pooling is None:
        raise InvalidRequest.field("pooling", "is a value this version does not know")
    return pooling


def tokenize_to_pb(value: TokenizeInput) -> pb.TokenizeRequest:
    out = pb.TokenizeRequest(
        model=value.model, tools=tools_to_pb(value.tools), no_special_tokens=value.no_special_tokens
    )
    if value.messages is not None:
        out.chat.CopyFrom(messages_to_pb(value.messages))
    elif value.prompt is not None:
        out.prompt = value.prompt
    return out


def tokenize_from_pb(message: pb.TokenizeRequest) -> TokenizeInput:
    which = message.WhichOneof("input")
    return TokenizeInput(
        model=message.model,
        prompt=message.prompt if which == "prompt" else None,
        messages=messages_from_pb(message.chat) if which == "chat" else None,
        tools=tools_from_pb(message.tools),
        no_special_tokens=message.no_special_tokens,
    )


def tokenized_to_pb(value: Tokenized) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(ids=value.ids, tokens=value.tokens, max_context=value.max_context)


def tokenized_from_pb(message: pb.TokenizeResponse) -> Tokenized:
    return Tokenized(ids=tuple(message.ids), tokens=tuple(message.tokens), max_context=message.max_context)


def embed_to_pb(value: EmbedInput) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        model=value.model,
        inputs=map(_text_to_pb, value.inputs),
        pooling=_POOLING[value.pooling],
        no_normalise=value.no_normalise,
        deadline_s=value.deadline_s,
    )


def embed_from_pb(message: pb.EmbedRequest) -> EmbedInput:
    """Raises InvalidRequest for an input without text and tokens, or an unknown pooling."""
    return EmbedInput(
        model=message.model,
        inputs=tuple(_text_from_pb(each, "inputs") for each in message.inputs),
        pooling=pooling_from_pb(message.pooling),
        no_normalise=message.no_normalise,
        deadline_s=message.deadline_s,
    )


def embeddings_to_pb(value: Embeddings) -> pb.EmbedResponse:
    vectors = [pb.Embedding(values=vector) for vector in value.vectors]
    return pb.EmbedResponse(embeddings=vectors, usage=usage_to_pb(value.usage))


def embeddings_from_pb(message: pb.EmbedResponse) -> Embeddings:
    vectors = tuple(tuple(each.values) for each in message.embeddings)
    return Embeddings(vectors=vectors, usage=usage_from_pb(message.usage))


def score_to_pb(value: ScoreInput) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        model=value.model,
        prompt=_text_to_pb(value.prompt),
        continuations=map(_text_to_pb, value.continuations),
        deadline_s=value.deadline_s,
    )


def score_from_pb(message: pb.ScoreRequest) -> ScoreInput:
    """Raises InvalidRequest for a prompt or continuation without text and tokens."""
    return ScoreInput(
        model=message.model,
        prompt=_text_from_pb(message.prompt, "prompt"),
        continuations=tuple(_text_from_pb(each, "continuations") for each in message.continuations),
        deadline_s=message.deadline_s,
    )


def scores_to_pb(value: Scores) -> pb.ScoreResponse:
    scores = [
        pb.ContinuationScore(logprob=each.logprob, tokens=map(logprob_to_pb, each.tokens))
        for each in value.scores
    ]
    return pb.ScoreResponse(scores=scores, usage=usage_to_pb(value.usage))


def scores_from_pb(message: pb.ScoreResponse) -> Scores:
    scores = tuple(
        ContinuationScore(logprob=each.logprob, tokens=tuple(map(logprob_from_pb, each.tokens)))
        for each in message.scores
    )
    return Scores(scores=scores, usage=usage_from_pb(message.usage))
