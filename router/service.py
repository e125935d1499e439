"""The router's gRPC services, thin over the hub: InferenceService for clients, ClusterService for workers."""

# ruff: noqa: N802 - the methods are named by the protocol
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc.aio

from pdserve.errors import Draining, InvalidRequest
from pdserve.rpc.convert import (
    Heartbeat,
    Leave,
    Register,
    embed_from_pb,
    embeddings_to_pb,
    expert_report_to_pb,
    explanation_to_pb,
    fleet_status_to_pb,
    generate_from_pb,
    join_answer_to_pb,
    join_event_from_pb,
    model_info_to_pb,
    outcome_to_pb,
    rebalance_answer_to_pb,
    score_from_pb,
    scores_to_pb,
    stream_event_to_pb,
    tokenize_from_pb,
    tokenized_to_pb,
)
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from router import texts
from router.caller import CALLER
from router.experts import ask_experts, rebalance_experts
from router.hub import Hub
from router.roster import Roster

INFERENCE = "pdserve.rpc.v1.InferenceService"
CLUSTER = "pdserve.rpc.v1.ClusterService"

_SHUTS_DOWN = "This router shuts down."

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """What clients speak."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Cancelled by gRPC when the client cancels, disconnects or runs out of time."""
        source = generate_from_pb(request)
        async with aclosing(self._hub.generate(source, context.time_remaining(), CALLER.get())) as events:  # type: ignore[type-var]
            async for event in events:
                await context.write(stream_event_to_pb(event))

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequest.field("request_id", "is empty; send the id of the request to abort.")
        return inference_pb2.AbortResponse(
            outcome=outcome_to_pb(self._hub.abort(request.request_id, CALLER.get()))
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        return tokenized_to_pb(await texts.tokenize(self._hub, tokenize_from_pb(request)))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        text = await texts.detokenize(self._hub, tuple(request.ids), request.model)
        return inference_pb2.DetokenizeResponse(text=text)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        source = embed_from_pb(request)
        return embeddings_to_pb(await texts.embed(self._hub, source, context.time_remaining(), CALLER.get()))

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        source = score_from_pb(request)
        return scores_to_pb(await texts.score(self._hub, source, context.time_remaining(), CALLER.get()))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return model_info_to_pb(self._hub.model_info(request.model))

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, context: Context
    ) -> inference_pb2.GetStatusResponse:
        return fleet_status_to_pb(self._hub.status())

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainResponse:
        if not request.request_id:
            raise InvalidRequest.field("request_id", "is empty; send the id of the request to explain.")
        return explanation_to_pb(await self._hub.explain(request.request_id, CALLER.get()))

    async def GetExperts(
        self, request: inference_pb2.GetExpertsRequest, context: Context
    ) -> inference_pb2.GetExpertsResponse:
        reports = await ask_experts(self._hub.roster, request.worker_id)
        return inference_pb2.GetExpertsResponse(reports=[expert_report_to_pb(report) for report in reports])

    async def RebalanceExperts(
        self, request: inference_pb2.RebalanceExpertsRequest, context: Context
    ) -> inference_pb2.RebalanceExpertsResponse:
        answers = await rebalance_experts(self._hub.roster, request.worker_id)
        return inference_pb2.RebalanceExpertsResponse(
            answers=[rebalance_answer_to_pb(answer) for answer in answers]
        )


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """What workers speak: one long stream each."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def Join(  # type: ignore[override]
        self, request_iterator: AsyncIterator[cluster_pb2.JoinRequest], context: Context
    ) -> None:
        """Register first, then heartbeats, each answered; an answer that is not accepted ends the stream."""
        if self._roster.closing:
            raise Draining(_SHUTS_DOWN)
        stream = asyncio.current_task()
        assert stream is not None
        record = None
        self._roster.open_streams.add(stream)
        try:
            async for message in request_iterator:
                received_s = self._roster.now()
                event = join_event_from_pb(message)
                match event:
                    case Register():
                        answer = self._roster.register(event, stream)
                        record = event.record if answer.accepted else None
                    case Heartbeat() if record is not None:
                        answer = self._roster.heartbeat(record, event)
                    case Leave() if record is not None:
                        self._roster.leave(record)
                        return
                    case _:
                        raise InvalidRequest.field("event", "a stream begins with register.")
                echo_s = event.monotonic_s
                stamped = replace(answer, echo_s=echo_s, received_s=received_s, replied_s=self._roster.now())
                await context.write(join_answer_to_pb(stamped))
                if not answer.accepted:
                    return
        except asyncio.CancelledError:
            if not self._roster.closing:
                raise
            # A cancelled handler would leave the call open until the server's grace is over.
            raise Draining(_SHUTS_DOWN) from None
        finally:
            self._roster.open_streams.discard(stream)
            if record is not None:
                self._roster.stream_ended(record, stream)
