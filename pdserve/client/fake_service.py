"""InferenceService of a fake server: messages into plain data and back, errors as a router sends them."""

# ruff: noqa: N802 - the methods are named by the protocol
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.api import ContinuationScore, Embeddings, Scores, TextOrTokens, Tokenized
from pdserve.client import fakes
from pdserve.errors import PdserveError, UnsupportedFeature
from pdserve.rpc.convert.generate import generate_from_pb, stream_event_to_pb
from pdserve.rpc.convert.public import explanation_to_pb, fleet_status_to_pb, model_info_to_pb
from pdserve.rpc.convert.texts import (
    embed_from_pb,
    embeddings_to_pb,
    score_from_pb,
    scores_to_pb,
    tokenize_from_pb,
    tokenized_to_pb,
)
from pdserve.rpc.convert.values import outcome_to_pb
from pdserve.rpc.status import code_of, trailers_of
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from pdserve.client.testing import FakeServer

T = TypeVar("T")
WIDTH = 8


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            self._server.on_came("Generate", request, context)
            for event in self._server.on_generate(generate_from_pb(request), context):
                yield stream_event_to_pb(event)
        except PdserveError as error:
            _end(context, error)

    def Abort(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Abort", request, context, self._abort)

    def Tokenize(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Tokenize", request, context, _tokenize)

    def Detokenize(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Detokenize", request, context, _detokenize)

    def Embed(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Embed", request, context, _embed)

    def Score(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Score", request, context, _score)

    def GetModel(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("GetModel", request, context, self._model)

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("GetStatus", request, context, lambda _: fleet_status_to_pb(fakes.fleet_status()))

    def Explain(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("Explain", request, context, self._explain)

    def GetExperts(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("GetExperts", request, context, _no_experts)

    def RebalanceExperts(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer("RebalanceExperts", request, context, _no_experts)

    def _answer(
        self, method: str, request: Any, context: grpc.ServicerContext, make: Callable[[Any], Any]
    ) -> Any:
        try:
            self._server.on_came(method, request, context)
            return make(request)
        except PdserveError as error:
            return _end(context, error)

    def _abort(self, request: Any) -> Any:
        outcome = self._server.on_abort(request.request_id)
        return inference_pb2.AbortResponse(outcome=outcome_to_pb(outcome))

    def _explain(self, request: Any) -> Any:
        return explanation_to_pb(self._server.on_explain(request.request_id))

    def _model(self, request: Any) -> Any:
        return model_info_to_pb(fakes.model_info(self._server.model))


def add_to_server(fake: FakeServer, server: grpc.Server) -> None:
    """Serves the fake's answers."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Servicer(fake), server)


def _end(context: grpc.ServicerContext, error: PdserveError) -> None:
    context.set_trailing_metadata(trailers_of(error))
    context.abort(code_of(error), error.message)


def _ids(text: TextOrTokens) -> tuple[int, ...]:
    return tuple(text.encode()) if isinstance(text, str) else text


def _tokenize(request: Any) -> Any:
    source = tokenize_from_pb(request)
    text = source.prompt if source.messages is None else fakes.chat_text(source.messages)
    data = (text or "").encode()
    tokens = tuple(bytes((byte,)) for byte in data)
    return tokenized_to_pb(Tokenized(ids=tuple(data), tokens=tokens, max_context=fakes.CONTEXT))


def _detokenize(request: Any) -> Any:
    text = bytes(token_id & 255 for token_id in request.ids).decode("utf-8", "replace")
    return inference_pb2.DetokenizeResponse(text=text)


def _embed(request: Any) -> Any:
    """A count of the bytes of each text by their last bits."""
    vectors = []
    for text in embed_from_pb(request).inputs:
        ids = _ids(text)
        vectors.append(tuple(float(sum(each % WIDTH == at for each in ids)) for at in range(WIDTH)))
    return embeddings_to_pb(Embeddings(vectors=tuple(vectors)))


def _score(request: Any) -> Any:
    scores = []
    for text in score_from_pb(request).continuations:
        tokens = tuple(map(fakes.odds, _ids(text)))
        scores.append(ContinuationScore(logprob=sum(token.logprob for token in tokens), tokens=tokens))
    return scores_to_pb(Scores(scores=tuple(scores)))


def _no_experts(request: Any) -> Any:
    raise UnsupportedFeature("A fake server has no experts.")
