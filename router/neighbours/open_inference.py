"""The Open Inference Protocol v2 over a hub: text in, text out, as BYTES tensors.

What lives here: the service. What does not: tensors and parameters (`oip_tensors`). Inputs: `text_input`, a
BYTES tensor of one text or several; options of `Generate` come as parameters of the request, by the same
names (`max_tokens`, `temperature`, `stop`, ...). Output: `text_output`, and `finish_reason` if asked for.
"""

# ruff: noqa: N802 - the methods are named by the protocol
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc.aio

from pdserve.api import ChoiceEnd, Chunk, GenerateInput
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.rpc.oip.v2 import open_inference_pb2 as pb
from pdserve.rpc.oip.v2 import open_inference_pb2_grpc
from router.caller import CALLER, Caller
from router.hub import Hub
from router.neighbours.oip_tensors import (
    FINISH,
    MAX_TEXTS,
    MODEL_VERSION,
    TEXT_IN,
    TEXT_OUT,
    asked,
    response,
    texts,
)

SERVICE = "inference.GRPCInferenceService"

Context = grpc.aio.ServicerContext[Any, Any]


class OpenInferenceServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The protocol's service on the hub's event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._hub.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._hub.ready and self._serves(request.name, request.version))

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name="pdserve", version=version("pdserve"), extensions=["model_stream_infer"]
        )

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        info = self._hub.model_info(request.name)
        self._check_version(request.version)
        outputs = [_tensor(TEXT_OUT), _tensor(FINISH)]
        return pb.ModelMetadataResponse(
            name=info.model,
            versions=[MODEL_VERSION],
            platform="pdserve",
            inputs=[_tensor(TEXT_IN)],
            outputs=outputs,
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """All texts of a request at once. One that fails ends the others, with its error."""
        sources = self._sources(request)
        caller, left = CALLER.get(), context.time_remaining()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(source, left, caller)) for source in sources]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        answers = [task.result() for task in tasks]
        return response(request, [text for text, _ in answers], [finish for _, finish in answers])

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Each request of the stream in turn; its text as it comes. An error is a response, as in Triton."""
        async for request in request_iterator:
            try:
                (source,) = self._sources(request, most=1)
                async for part in self._parts(request, source, context.time_remaining()):
                    yield pb.ModelStreamInferResponse(infer_response=part)
            except PdserveError as error:
                failed = pb.ModelInferResponse(id=request.id, model_name=request.model_name)
                yield pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed)

    # -- inside -----------------------------------------------------------------------------------------

    def _serves(self, name: str, model_version: str) -> bool:
        model = self._hub.roster.model
        return model is not None and name in ("", model.name) and model_version in ("", MODEL_VERSION)

    def _check_version(self, asked_version: str) -> None:
        if asked_version not in ("", MODEL_VERSION):
            raise InvalidRequest.field("model_version", f"this server has version {MODEL_VERSION} only.")

    def _sources(self, request: pb.ModelInferRequest, most: int = MAX_TEXTS) -> list[GenerateInput]:
        """The requests for generation that a message holds. Raises PdserveError."""
        self._check_version(request.model_version)
        prompts = texts(request)
        if len(prompts) > most:
            raise InvalidRequest.field(TEXT_IN, f"may hold {most} texts at most here.")
        return [asked(request, prompt) for prompt in prompts]

    async def _answer(self, source: GenerateInput, left: float | None, caller: Caller) -> tuple[str, str]:
        pieces: list[str] = []
        finish = ""
        async with aclosing(self._hub.generate(source, left, caller)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Chunk) and not event.choice:
                    pieces.append(event.text)
                elif isinstance(event, ChoiceEnd) and not event.choice:
                    finish = str(event.finish_reason)
        return "".join(pieces), finish

    async def _parts(
        self, request: pb.ModelInferRequest, source: GenerateInput, left: float | None
    ) -> AsyncIterator[pb.ModelInferResponse]:
        async with aclosing(self._hub.generate(source, left, CALLER.get())) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Chunk) and event.text and not event.choice:
                    yield response(request, [event.text], [""])
                elif isinstance(event, ChoiceEnd) and not event.choice:
                    last = response(request, [""], [str(event.finish_reason)])
                    last.parameters["triton_final_response"].bool_param = True
                    yield last


def _tensor(name: str) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=name, datatype="BYTES", shape=[-1])
