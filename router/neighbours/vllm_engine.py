"""vLLM's engine contract (`vllm.grpc.engine.VllmEngine`, of the package smg-grpc-proto) over a hub.

So gateways that drive vLLM's workers drive ours: tokens in, tokens out. What lives here: the service. What
does not: its messages as our requests (`vllm_requests`). Caches are handed over by our own router, not by
this contract: requests that carry transfer parameters are refused.
"""

# ruff: noqa: N802 - the methods are named by the protocol
from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from pdserve.api import Admitted, ChoiceEnd, Chunk, EmbedInput, End, Pooling, StreamEvent
from pdserve.errors import UnsupportedFeature
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.types import TokenLogprob
from router import texts
from router.caller import CALLER
from router.hub import Hub
from router.neighbours.vllm_requests import asked

SERVICE = "vllm.grpc.engine.VllmEngine"
CHUNK_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]
pb: Any = vllm_engine_pb2
common: Any = common_pb2


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The contract's service on the hub's event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._ids: dict[tuple[str, str], str] = {}
        """By tenant and the client's id: our id of a live request."""

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Chunks where `stream` is set; then each choice's whole output."""
        source, caller = asked(request), CALLER.get()
        choices = _Choices(stream=request.stream)
        name = (caller.tenant, request.request_id)
        try:
            async with aclosing(self._hub.generate(source, context.time_remaining(), caller)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Admitted) and request.request_id:
                        self._ids[name] = event.request_id
                    for response in choices.take(event):
                        yield response
        finally:
            self._ids.pop(name, None)

    async def Abort(self, request: Any, context: Context) -> Any:
        """Ends requests of the caller's; ids that are not known are none of its."""
        caller = CALLER.get()
        for request_id in request.request_ids:
            ours = self._ids.get((caller.tenant, request_id))
            if ours is not None:
                self._hub.abort(ours, caller)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        ready = self._hub.ready
        return pb.HealthCheckResponse(healthy=ready, message="" if ready else "no worker is ready")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        info = self._hub.model_info()
        limits = info.limits
        return pb.GetModelInfoResponse(
            model_path=info.model,
            served_model_name=info.model,
            tokenizer_path=info.model,
            is_generation=True,
            max_context_length=limits.max_context,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.end_token_ids,
            bos_token_id=-1 if limits.bos_token_id is None else limits.bos_token_id,
            pad_token_id=-1,
            max_req_input_len=limits.max_context - 1,
            default_sampling_params_json="{}",
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        status, info = self._hub.status(), self._hub.model_info()
        sizes = {worker.record.page_size for worker in status.workers}
        return pb.GetServerInfoResponse(
            active_requests=status.running,
            uptime_seconds=status.uptime_s,
            server_type="pdserve",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=min(sizes, default=0),
            model_dtype=f"torch.{info.dtype}",
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """One entry: all workers that this hub knows, together."""
        status = self._hub.status()
        loads = [(worker.record.page_size, worker.load) for worker in status.workers]
        total = sum(size * load.num_pages for size, load in loads)
        used = sum(size * (load.num_pages - load.free_pages - load.evictable_pages) for size, load in loads)
        running = sum(load.num_running for _, load in loads)
        waiting = status.queued + sum(load.num_waiting for _, load in loads)
        share = used / total if total else 0.0
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=share,
            utilization=share,
            num_waiting_uncached_tokens=sum(load.waiting_tokens for _, load in loads),
        )
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return pb.GetLoadsResponse(timestamp=stamp, version="pdserve", dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """A zip of tokenizer.json and tokenizer_config.json, in chunks; the last has its SHA-256."""
        data = await asyncio.to_thread(tokenizer_zip, self._hub.served("").bundle)
        starts = range(0, len(data), CHUNK_BYTES)
        for start in starts:
            last = start == starts[-1]
            digest = hashlib.sha256(data).hexdigest() if last else ""
            yield common.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=digest)

    async def FlushCache(self, request: Any, context: Context) -> Any:
        message = "Workers drop cached pages by themselves when they need room."
        return common.FlushCacheResponse(success=False, message=message)

    async def StartProfile(self, request: Any, context: Context) -> Any:
        return common.ProfileResponse(success=False, message="Use `pdserve bench` or `pdserve explain`.")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        return common.ProfileResponse(success=False, message="No profiler runs.")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        raise UnsupportedFeature("Events of cached pages are not offered; our router knows its caches.")
        yield  # makes this a stream

    async def Embed(self, request: Any, context: Context) -> Any:
        """The vector of the last token's hidden state, of length 1."""
        source = EmbedInput(inputs=(tuple(request.tokenized.input_ids),), pooling=Pooling.LAST)
        made = await texts.embed(self._hub, source, context.time_remaining(), CALLER.get())
        (vector,) = made.vectors
        return pb.EmbedResponse(
            embedding=vector, prompt_tokens=made.usage.prompt_tokens, embedding_dim=len(vector)
        )


def add_to(server: grpc.aio.Server, hub: Hub) -> None:
    """Has a server speak the contract."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(hub), server)


class _Choices:
    """The outputs of one request as they grow."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._prompt = 0
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._ended: list[ChoiceEnd] = []

    def take(self, event: StreamEvent) -> list[Any]:
        """What is to be sent for an event."""
        match event:
            case Admitted():
                self._prompt = event.prompt_tokens
            case Chunk():
                return self._chunk(event)
            case ChoiceEnd():
                self._ended.append(event)
            case End():
                return [self._complete(choice, event.usage.cached_tokens) for choice in self._ended]
        return []

    def _chunk(self, chunk: Chunk) -> list[Any]:
        ids = self._ids.setdefault(chunk.choice, [])
        ids += chunk.token_ids
        self._logprobs.setdefault(chunk.choice, []).extend(chunk.logprobs)
        if not self._stream or not chunk.token_ids:
            return []
        part = pb.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt,
            completion_tokens=len(ids),
            output_logprobs=_logprobs(chunk.logprobs),
            index=chunk.choice,
        )
        return [pb.GenerateResponse(chunk=part)]

    def _complete(self, end: ChoiceEnd, cached: int) -> Any:
        ids = self._ids.get(end.choice, [])
        whole = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=str(end.finish_reason),
            prompt_tokens=self._prompt,
            completion_tokens=len(ids),
            cached_tokens=cached,
            output_logprobs=_logprobs(self._logprobs.get(end.choice, [])),
            index=end.choice,
        )
        if end.stop_text:
            whole.matched_stop_str = end.stop_text
        elif end.stop_token_id is not None:
            whole.matched_token_id = end.stop_token_id
        return pb.GenerateResponse(complete=whole)


def _logprobs(values: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> Any:
    """None where none were asked for."""
    if not values:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[value.logprob for value in values],
        token_ids=[value.token_id for value in values],
        top_logprobs=[
            pb.TopLogProbs(
                values=[other.logprob for other in value.top],
                token_ids=[other.token_id for other in value.top],
            )
            for value in values
        ],
    )


def tokenizer_zip(bundle: TokenizerBundle) -> bytes:
    """What a gateway needs to encode and decode as we do, in the files of Hugging Face directories. The same
    bundle always gives the same bytes."""
    config = {
        "chat_template": bundle.chat_template,
        "add_bos_token": bundle.add_bos,
        **dict(bundle.special_tokens),
    }
    files = {
        "tokenizer.json": bundle.tokenizer_json,
        "tokenizer_config.json": json.dumps(config, sort_keys=True).encode(),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=zipfile.ZIP_DEFLATED)
    return out.getvalue()
