"""The calls with one answer: arguments into a request, and the answer into plain data. For both clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdserve.api import (
    Embeddings,
    EmbedInput,
    ExpertReport,
    Explanation,
    FleetStatus,
    ModelInfo,
    Pooling,
    RebalanceAnswer,
    ScoreInput,
    Scores,
    TextOrTokens,
    Tokenized,
    TokenizeInput,
)
from pdserve.client.chat import Message, ToolLike, message_of, tool_of
from pdserve.client.request import built
from pdserve.errors import InvalidRequest
from pdserve.messages import Outcome

T = TypeVar("T")
Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One call: the method's name, its request, and how to read its answer. repeats: see Tries."""

    method: str
    request: Any
    read: Callable[[Any], T]
    deadline_s: float
    repeats: bool = True


def _text(value: Text) -> TextOrTokens:
    return value if isinstance(value, str) else tuple(value)


def _texts(name: str, values: Sequence[Text]) -> tuple[TextOrTokens, ...]:
    if isinstance(values, str):
        raise InvalidRequest.field(name, "give a sequence of texts, not one text.")
    return tuple(map(_text, values))


def abort(request_id: str, deadline_s: float) -> Call[Outcome]:
    from pdserve.rpc.convert import outcome_from_pb
    from pdserve.rpc.v1.inference_pb2 import AbortRequest

    return Call(
        method="Abort",
        request=built(lambda: AbortRequest(request_id=request_id)),
        read=lambda answer: outcome_from_pb(answer.outcome),
        deadline_s=deadline_s,
    )


def tokenize(
    prompt: str | None,
    messages: Sequence[Message] | None,
    tools: Sequence[ToolLike],
    no_special_tokens: bool,
    model: str,
    deadline_s: float,
) -> Call[Tokenized]:
    from pdserve.rpc.convert.texts import tokenize_to_pb, tokenized_from_pb

    if (prompt is None) == (messages is None):
        raise InvalidRequest.field("input", "give exactly one of prompt and messages.")

    def make() -> Any:
        return tokenize_to_pb(
            TokenizeInput(
                model=model,
                prompt=prompt,
                messages=None if messages is None else tuple(map(message_of, messages)),
                tools=tuple(map(tool_of, tools)),
                no_special_tokens=no_special_tokens,
            )
        )

    return Call(method="Tokenize", request=built(make), read=tokenized_from_pb, deadline_s=deadline_s)


def detokenize(token_ids: Sequence[int], model: str, deadline_s: float) -> Call[str]:
    from pdserve.rpc.v1.inference_pb2 import DetokenizeRequest

    request = built(lambda: DetokenizeRequest(model=model, ids=token_ids))
    return Call(method="Detokenize", request=request, read=lambda a: str(a.text), deadline_s=deadline_s)


def embed(
    inputs: Sequence[Text], pooling: Pooling | str, no_normalise: bool, model: str, deadline_s: float
) -> Call[Embeddings]:
    from pdserve.rpc.convert.texts import embed_to_pb, embeddings_from_pb

    def make() -> Any:
        return embed_to_pb(
            EmbedInput(
                inputs=_texts("inputs", inputs),
                model=model,
                pooling=Pooling(pooling),
                no_normalise=no_normalise,
                deadline_s=deadline_s,
            )
        )

    return Call(method="Embed", request=built(make), read=embeddings_from_pb, deadline_s=deadline_s)


def score(prompt: Text, continuations: Sequence[Text], model: str, deadline_s: float) -> Call[Scores]:
    from pdserve.rpc.convert.texts import score_to_pb, scores_from_pb

    def make() -> Any:
        return score_to_pb(
            ScoreInput(
                prompt=_text(prompt),
                continuations=_texts("continuations", continuations),
                model=model,
                deadline_s=deadline_s,
            )
        )

    return Call(method="Score", request=built(make), read=scores_from_pb, deadline_s=deadline_s)


def get_model(model: str, deadline_s: float) -> Call[ModelInfo]:
    from pdserve.rpc.convert import model_info_from_pb
    from pdserve.rpc.v1.inference_pb2 import GetModelRequest

    request = built(lambda: GetModelRequest(model=model))
    return Call(method="GetModel", request=request, read=model_info_from_pb, deadline_s=deadline_s)


def get_status(deadline_s: float) -> Call[FleetStatus]:
    from pdserve.rpc.convert import fleet_status_from_pb
    from pdserve.rpc.v1.inference_pb2 import GetStatusRequest

    return Call(
        method="GetStatus", request=GetStatusRequest(), read=fleet_status_from_pb, deadline_s=deadline_s
    )


def explain(request_id: str, deadline_s: float) -> Call[Explanation]:
    from pdserve.rpc.convert import explanation_from_pb
    from pdserve.rpc.v1.inference_pb2 import ExplainRequest

    request = built(lambda: ExplainRequest(request_id=request_id))
    return Call(method="Explain", request=request, read=explanation_from_pb, deadline_s=deadline_s)


def get_experts(worker_id: str, deadline_s: float) -> Call[tuple[ExpertReport, ...]]:
    from pdserve.rpc.convert import expert_report_from_pb
    from pdserve.rpc.v1.inference_pb2 import GetExpertsRequest

    return Call(
        method="GetExperts",
        request=built(lambda: GetExpertsRequest(worker_id=worker_id)),
        read=lambda answer: tuple(map(expert_report_from_pb, answer.reports)),
        deadline_s=deadline_s,
    )


def rebalance_experts(worker_id: str, deadline_s: float) -> Call[tuple[RebalanceAnswer, ...]]:
    from pdserve.rpc.convert import rebalance_answer_from_pb
    from pdserve.rpc.v1.inference_pb2 import RebalanceExpertsRequest

    return Call(
        method="RebalanceExperts",
        request=built(lambda: RebalanceExpertsRequest(worker_id=worker_id)),
        read=lambda answer: tuple(map(rebalance_answer_from_pb, answer.answers)),
        deadline_s=deadline_s,
        repeats=False,
    )
