"""The served model's text side: its tokenizer bundle, fetched from a worker; prompts to ids, ids to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import grpc

from pdserve.api import GenerateInput, ModelInfo
from pdserve.chat.parts import Part
from pdserve.errors import ModelError
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import cluster_pb2
from pdserve.tokenizer.bundle import MAX_BUNDLE_BYTES, TokenizerBundle
from pdserve.tokenizer.encode import Tokenizer
from pdserve.tokenizer.incremental import IncrementalDecoder
from pdserve.tokenizer.stops import StopMatcher
from pdserve.types import TokenLogprob, WorkerRecord
from router.links import WorkerLink

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_CHARS = 2000
"""Texts up to this long are tokenised on the event loop (well under a millisecond), longer ones off it."""
FETCH_TIMEOUT_S = 30.0
_OVERHEAD_BYTES = 2 << 20


class ServedModel:
    """One model's tokenizer and facts. Immutable."""

    def __init__(self, bundle: TokenizerBundle, record: WorkerRecord, pool: ThreadPoolExecutor) -> None:
        """Raises ModelError if the bundle can not be used."""
        self.name = record.model_name
        self.limits = record.limits
        self.digest = record.capability.tokenizer
        self.bundle = bundle
        self._tokenizer = Tokenizer(bundle)
        self._pool = pool
        self.info = ModelInfo(
            model=record.model_name,
            limits=record.limits,
            has_chat_template=bundle.chat_template is not None,
            dtype=record.capability.dtype,
            model_digest=record.capability.model,
        )

    async def encode(self, source: GenerateInput) -> tuple[int, ...]:
        """The prompt's ids. Raises InvalidRequest or UnsupportedFeature for what can not be encoded."""
        if source.token_ids is not None:
            return source.token_ids
        if source.prompt is not None and len(source.prompt) <= INLINE_CHARS:
            return tuple(self._tokenizer.encode(source.prompt))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode, source)

    async def encode_plain(self, text: str, *, special_tokens: bool) -> tuple[int, ...]:
        """Ids of a text. special_tokens: with what the model wants before a prompt. Raises InvalidRequest."""

        def encode() -> list[int]:
            return self._tokenizer.encode(text, special_tokens=special_tokens)

        return tuple(await self._off_loop(len(text), encode))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens as they are written."""
        return await self._off_loop(
            len(token_ids), lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False)
        )

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        """The work's result: at once for little, else by another thread."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode(self, source: GenerateInput) -> tuple[int, ...]:
        if source.prompt is not None:
            return tuple(self._tokenizer.encode(source.prompt))
        messages = [{"role": m.role, "content": m.content} for m in source.messages or ()]
        return tuple(self._tokenizer.encode_chat(messages))

    def text(self, stop: tuple[str, ...], min_tokens: int = 0) -> TextStream:
        """A decoder for one completion that ends at the first of the stop texts; in its first `min_tokens`
        tokens none is looked for."""
        matcher = StopMatcher(stop) if stop else None
        return TextStream(IncrementalDecoder(self._tokenizer), matcher, min_tokens)

    def spelled(self, logprob: TokenLogprob) -> TokenLogprob:
        """The same with the bytes of each token, as clients get it."""
        top = tuple(replace(other, token=self.token_bytes(other.token_id)) for other in logprob.top)
        return replace(logprob, token=self.token_bytes(logprob.token_id), top=top)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token's text, be they a part of a character."""
        return self._tokenizer.token_bytes(token_id)


class TextStream:
    """Text of one completion: what may go to the client, and whether a stop text was found."""

    def __init__(self, decoder: IncrementalDecoder, matcher: StopMatcher | None, min_tokens: int = 0) -> None:
        self._decoder, self._matcher = decoder, matcher
        self._unmatched = min_tokens
        self.stopped = False

    @property
    def stop_text(self) -> str:
        """The stop text that was found, or empty."""
        return (self._matcher.stop or "") if self._matcher is not None else ""

    def push(self, token_id: int) -> Part:
        """What became certain with this token. After a match: sets `stopped`, and gives no more."""
        text = self._decoder.push(token_id)
        if self._unmatched:
            self._unmatched -= 1
            return Part(text=text)
        return Part(text=self._feed(text))

    def finish(self) -> Part:
        """What was held back, at the end of the stream."""
        if self.stopped:
            return Part()
        text = self._feed(self._decoder.finish())
        return Part(text=text + self._matcher.finish() if self._matcher is not None else text)

    def _feed(self, text: str) -> str:
        if self._matcher is None:
            return text
        text, self.stopped = self._matcher.feed(text)
        return text


async def fetch_model(link: WorkerLink, pool: ThreadPoolExecutor) -> ServedModel:
    """Fetches and loads the bundle of the worker's model. Raises ModelError or what the call raised."""
    record = link.record
    digest = record.capability.tokenizer
    data = await _fetch(link, digest)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, _load, data, digest, record, pool)


def _load(data: bytes, digest: str, record: WorkerRecord, pool: ThreadPoolExecutor) -> ServedModel:
    bundle = TokenizerBundle.from_bytes(data)
    if bundle.digest != digest:
        raise ModelError("The tokenizer that a worker sent is not the one it announced.")
    return ServedModel(bundle, record, pool)


async def _fetch(link: WorkerLink, digest: str) -> bytes:
    request = cluster_pb2.FetchTokenizerRequest(digest=digest)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in link.worker.FetchTokenizer(request, timeout=FETCH_TIMEOUT_S, wait_for_ready=True):
            parts.append(part.chunk)
            size += len(part.chunk)
            if size > MAX_BUNDLE_BYTES + _OVERHEAD_BYTES:
                raise ModelError("The tokenizer that a worker sends is too large.")
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error
    return b"".join(parts)
