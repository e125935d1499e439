"""The served model's text side: its tokenizer bundle, fetched from a worker; prompts to ids, ids to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc

from pdserve.api import GenerateInput, ModelInfo
from pdserve.chat.grammar import tools_error
from pdserve.chat.parser import ChatParser, ChatPlan
from pdserve.chat.parts import Part, joined
from pdserve.chat.prepare import plan_of, prepare
from pdserve.chat.profile import ChatProfile, profile_of
from pdserve.errors import InvalidRequest, ModelError
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import cluster_pb2
from pdserve.tokenizer.bundle import MAX_BUNDLE_BYTES, TokenizerBundle
from pdserve.tokenizer.encode import Tokenizer
from pdserve.tokenizer.incremental import IncrementalDecoder
from pdserve.tokenizer.stops import StopMatcher
from pdserve.types import TokenLogprob, WorkerRecord
from router.grammars import GrammarCheck
from router.links import WorkerLink
from router.validate import ValidRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_CHARS = 2000
"""Texts up to this long are tokenised on the event loop (well under a millisecond), longer ones off it."""
PROMPT_END_TOKENS = 32
"""Enough to see whether a prompt ends within the model's thoughts."""
FETCH_TIMEOUT_S = 30.0
_OVERHEAD_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt's ids; chat: how the answer is read and written, None for a plain one."""

    ids: tuple[int, ...]
    chat: ChatPlan | None = None


class ServedModel:
    """One model's tokenizer and facts. Immutable."""

    def __init__(
        self,
        bundle: TokenizerBundle,
        record: WorkerRecord,
        pool: ThreadPoolExecutor,
        tool_format: str = "auto",
    ) -> None:
        """tool_format: as in RouterConfig. Raises ModelError if the bundle can not be used."""
        self.name = record.model_name
        self.limits = record.limits
        self.digest = record.capability.tokenizer
        self.bundle = bundle
        self._tokenizer = Tokenizer(bundle)
        self._grammars = GrammarCheck(self._tokenizer)
        self._pool = pool
        template = self._tokenizer.template
        named = dict(bundle.special_tokens)
        self._chat = ChatProfile() if template is None else profile_of(template, named, tool_format)
        self.info = ModelInfo(
            model=record.model_name,
            limits=record.limits,
            has_chat_template=bundle.chat_template is not None,
            dtype=record.capability.dtype,
            model_digest=record.capability.model,
        )

    async def check_grammar(self, tenant: str, request: ValidRequest) -> None:
        """As GrammarCheck.check. Of a grammar that was made of tools, an error names these."""
        try:
            await self._grammars.check(tenant, request.sampling.grammar)
        except InvalidRequest as error:
            if request.chat is None or request.chat.grammar is None:
                raise
            raise tools_error(error) from None

    async def encode(self, source: GenerateInput) -> tuple[int, ...]:
        """The prompt's ids. Raises InvalidRequest or UnsupportedFeature for what can not be encoded."""
        return (await self.prompt(source)).ids

    async def prompt(self, source: GenerateInput) -> Prompt:
        """The prompt as the model takes it, and how its answer is read. Raises as `encode` does."""
        if source.token_ids is not None:
            return Prompt(ids=source.token_ids)
        if source.prompt is not None:
            return Prompt(ids=await self.encode_plain(source.prompt, special_tokens=True))
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._chat_prompt, source)

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

    def _chat_prompt(self, source: GenerateInput) -> Prompt:
        tokenizer = self._tokenizer
        chat = prepare(source, self._chat)
        ids = tokenizer.encode_chat(chat.messages, tools=chat.tools, options=chat.options)
        end = tokenizer.decode(ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        return Prompt(ids=tuple(ids), chat=plan_of(source, self._chat, end, tokenizer.special_ids))

    def text(
        self, stop: tuple[str, ...], min_tokens: int = 0, chat: ChatPlan | None = None, call_key: str = ""
    ) -> TextStream:
        """A decoder for one completion that ends at the first of the stop texts; in its first `min_tokens`
        tokens none is looked for. call_key: makes the ids of a chat's tool calls; equal keys, equal ids."""
        matcher = StopMatcher(stop) if stop else None
        shown = frozenset() if chat is None else chat.markers
        parser = ChatParser(chat, call_key) if shown and chat is not None else None
        return TextStream(IncrementalDecoder(self._tokenizer, shown=shown), matcher, min_tokens, parser)

    async def all_bytes(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Each as `token_bytes` gives it."""
        return await self._off_loop(len(token_ids), lambda: tuple(map(self.token_bytes, token_ids)))

    async def all_spelled(self, logprobs: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Each as `spelled` gives it."""
        size = sum(1 + len(each.top) for each in logprobs)
        return await self._off_loop(size, lambda: tuple(map(self.spelled, logprobs)))

    def spelled(self, logprob: TokenLogprob) -> TokenLogprob:
        """The same with the bytes of each token, as clients get it."""
        top = tuple(replace(other, token=self.token_bytes(other.token_id)) for other in logprob.top)
        return replace(logprob, token=self.token_bytes(logprob.token_id), top=top)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token's text, be they a part of a character."""
        return self._tokenizer.token_bytes(token_id)


class TextStream:
    """Text of one completion: what may go to the client, and whether a stop text was found.

    Stop texts are looked for in all that the model writes; then reasoning and calls are told apart.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        matcher: StopMatcher | None,
        min_tokens: int = 0,
        parser: ChatParser | None = None,
    ) -> None:
        self._decoder, self._matcher, self._parser = decoder, matcher, parser
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
        else:
            text = self._match(text)
        return Part(text=text) if self._parser is None else self._parser.feed(text)

    def finish(self) -> Part:
        """What was held back, at the end of the stream."""
        text = ""
        if not self.stopped:
            text = self._match(self._decoder.finish())
            text += self._matcher.finish() if self._matcher is not None else ""
        if self._parser is None:
            return Part(text=text)
        return joined((self._parser.feed(text), self._parser.finish()))

    def _match(self, text: str) -> str:
        if self._matcher is None:
            return text
        text, self.stopped = self._matcher.feed(text)
        return text


async def fetch_model(link: WorkerLink, pool: ThreadPoolExecutor, tool_format: str) -> ServedModel:
    """Fetches and loads the bundle of the worker's model. Raises ModelError or what the call raised."""
    record = link.record
    digest = record.capability.tokenizer
    data = await _fetch(link, digest)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, _load, data, digest, record, pool, tool_format)


def _load(
    data: bytes, digest: str, record: WorkerRecord, pool: ThreadPoolExecutor, tool_format: str
) -> ServedModel:
    bundle = TokenizerBundle.from_bytes(data)
    if bundle.digest != digest:
        raise ModelError("The tokenizer that a worker sent is not the one it announced.")
    return ServedModel(bundle, record, pool, tool_format)


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
