"""The asyncio client. Use it from one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from pdserve.api import (
    Embeddings,
    ExpertReport,
    Explanation,
    FleetStatus,
    ModelInfo,
    Pooling,
    RebalanceAnswer,
    Scores,
    Tokenized,
)
from pdserve.client import calls
from pdserve.client.aio_stream import AsyncStream
from pdserve.client.calls import Call, Text
from pdserve.client.chat import Message, ToolLike
from pdserve.client.connect import ClientOptions, Routers
from pdserve.client.many import Answer, ManyPrompt, Progress, many_async
from pdserve.client.pool import Endpoint
from pdserve.client.request import (
    CONTROL_TIMEOUT_S,
    DEFAULT_ADDRESS,
    DEFAULT_DEADLINE_S,
    PLAN_TIMEOUT_S,
    GenerateOptions,
    build,
)
from pdserve.client.sending import rpc_failure
from pdserve.errors import Cancelled, Unavailable, UnknownRequest
from pdserve.messages import Outcome

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")


class AsyncClient:
    """A client of one router or several. Dials at the first call; close it, or use `async with`.

    Every call has a deadline, for all its tries together. All methods raise the errors of pdserve.errors and
    no others.
    """

    def __init__(
        self, address: str | Sequence[str] = DEFAULT_ADDRESS, **options: Unpack[ClientOptions]
    ) -> None:
        """address: host:port of the router; of several as a list, or with commas. options: see ClientOptions.
        Must be called in a running event loop. Raises ConfigError for certificates or a key that can not be
        used."""
        from pdserve.rpc.channel import open_channel
        from pdserve.rpc.credentials import close_soon

        self._routers = Routers(
            address,
            options,
            lambda each, tls: open_channel(each, tls=tls),
            close_soon,
        )

    # -- generation ------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Starts answers to a prompt, a conversation or token ids. Raises InvalidRequest at once."""
        return AsyncStream(self._routers, build(prompt, messages, token_ids, options))

    def generate_many(
        self,
        prompts: Iterable[ManyPrompt],
        *,
        concurrency: int = 16,
        ordered: bool = True,
        progress: Callable[[Progress], object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[Answer]:
        """Answers many prompts, `concurrency` at a time. One that fails does not end the others.

        prompts: texts, or mappings with prompt, messages or token_ids and options of their own; read as they
        are needed. ordered: answers come in the order of the prompts, else as they are ready. progress:
        called after each. Leaving the iterator (`aclose`) cancels what runs. Raises InvalidRequest.
        """
        return many_async(self, prompts, concurrency, ordered, progress, options)

    async def abort(self, request_id: str, *, deadline_s: float = CONTROL_TIMEOUT_S) -> Outcome:
        """Ends a request by the id its stream has. UNKNOWN: no router remembers it."""
        outcome = Outcome.UNKNOWN
        for router in self._routers.pool.asked_for(request_id):
            outcome = await self._ask(calls.abort(request_id, deadline_s), router)
            if outcome is not Outcome.UNKNOWN:
                break
        return outcome

    async def explain(self, request_id: str, *, deadline_s: float = CONTROL_TIMEOUT_S) -> Explanation:
        """Where a request's time went, or what it waits for. Raises UnknownRequest."""
        *first, last = self._routers.pool.asked_for(request_id)
        for router in first:
            try:
                return await self._ask(calls.explain(request_id, deadline_s), router)
            except (UnknownRequest, Unavailable):
                continue
        return await self._ask(calls.explain(request_id, deadline_s), last)

    # -- texts -----------------------------------------------------------------------------------------

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[ToolLike] = (),
        no_special_tokens: bool = False,
        model: str = "",
        deadline_s: float = CONTROL_TIMEOUT_S,
    ) -> Tokenized:
        """Tokens of a plain prompt, or of a chat as the model's template renders it."""
        return await self._ask(calls.tokenize(prompt, messages, tools, no_special_tokens, model, deadline_s))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", deadline_s: float = CONTROL_TIMEOUT_S
    ) -> str:
        """The text of token ids."""
        return await self._ask(calls.detokenize(token_ids, model, deadline_s))

    async def embed(
        self,
        inputs: Sequence[Text],
        *,
        pooling: Pooling | str = Pooling.MEAN,
        no_normalise: bool = False,
        model: str = "",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Embeddings:
        """A vector for each text (or token ids), [hidden size], of length 1 unless no_normalise."""
        return await self._ask(calls.embed(inputs, pooling, no_normalise, model, deadline_s))

    async def score(
        self,
        prompt: Text,
        continuations: Sequence[Text],
        *,
        model: str = "",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Scores:
        """How likely each continuation of the prompt is: sums of log-probabilities, and each token's."""
        return await self._ask(calls.score(prompt, continuations, model, deadline_s))

    # -- the fleet -------------------------------------------------------------------------------------

    async def get_model(self, model: str = "", *, deadline_s: float = CONTROL_TIMEOUT_S) -> ModelInfo:
        """The model that is served. Raises Unavailable before the first worker has registered."""
        return await self._ask(calls.get_model(model, deadline_s))

    async def get_status(self, *, deadline_s: float = CONTROL_TIMEOUT_S) -> FleetStatus:
        """One router's view of its fleet."""
        return await self._ask(calls.get_status(deadline_s))

    async def get_experts(
        self, worker_id: str = "", *, deadline_s: float = CONTROL_TIMEOUT_S
    ) -> tuple[ExpertReport, ...]:
        """How much experts are used and where they lie, of one worker or all. Raises Unavailable."""
        return await self._ask(calls.get_experts(worker_id, deadline_s))

    async def rebalance_experts(
        self, worker_id: str = "", *, deadline_s: float = PLAN_TIMEOUT_S
    ) -> tuple[RebalanceAnswer, ...]:
        """Has one worker or all place their experts anew; returns once they have planned. Raises
        Unavailable."""
        return await self._ask(calls.rebalance_experts(worker_id, deadline_s))

    async def _ask(self, call: Call[T], only: Endpoint | None = None) -> T:
        import asyncio

        tries = self._routers.tries(call.deadline_s, only=only, repeats=call.repeats)
        metadata = self._routers.sent_with()
        while True:
            router = tries.take()
            try:
                method = getattr(router.stub(), call.method)
                answer = await method(call.request, timeout=tries.left_s(), metadata=metadata)
            except Exception as failure:
                error, answered = rpc_failure(failure)
                wait_s = tries.failed(error, answered=answered)
                if wait_s is None:
                    raise error from None
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise Cancelled("The client was closed.") from None
            else:
                tries.reached()
                return call.read(answer)
            finally:
                self._routers.pool.done(router)

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._routers.channels():
            await channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
