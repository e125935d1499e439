"""Evaluate calls at work: waiting for a turn, choosing a worker, calling it, once more if it is lost.

What lives here: one text through one worker's model. What does not: what texts are asked for (`texts`), how
load is counted (`inflight`), generation (`request`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from pdserve.clock import Clock
from pdserve.errors import (
    Cancelled,
    DeadlineExpired,
    Draining,
    Overloaded,
    PdserveError,
    StalePeer,
    Unavailable,
)
from pdserve.messages import Evaluate, Evaluated, EvaluateParams
from pdserve.rpc.convert import evaluate_to_pb, evaluated_from_pb
from pdserve.rpc.status import error_from_rpc
from pdserve.types import Key, PeerRef
from router.admission import Shed
from router.calls import LOST_MESSAGE, Metadata
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.policy import choose_evaluator
from router.roster import Roster

MAX_RUNNING = 16
"""Texts at workers at a time. One of these fills a worker's steps; more of them only hold its pages."""
TRIES = 2
_ELSEWHERE = (Unavailable, Overloaded, StalePeer, Cancelled)
"""These say nothing about the text: another worker may take it. A channel that closes cancels its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Tokens to evaluate for somebody. deadline_at: by the router's clock. cache_salt: see
    `pdserve.messages.Reserve`. near: an incarnation that has computed what it begins with, if one has. trace:
    goes with the call, so that it stays one trace."""

    token_ids: tuple[int, ...]
    params: EvaluateParams
    tenant: str
    deadline_at: float
    cache_salt: str = ""
    priority: int = 0
    use_prefix_cache: bool = True
    near: int | None = None
    trace: Metadata = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a worker said of a text, and which incarnation it was."""

    result: Evaluated
    incarnation: int


class Evaluator:
    """All Evaluate calls of one router. Owned by the event loop."""

    def __init__(self, config: RouterConfig, roster: Roster, dispatcher: Dispatcher, clock: Clock) -> None:
        """config: texts that wait are bounded as requests are, each text counts."""
        self._roster, self._dispatcher, self._clock = roster, dispatcher, clock
        self._line = Line(config)
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self._numbers = itertools.count()

    async def run(self, text: Text) -> Told:
        """Raises Overloaded, Unavailable or DeadlineExpired, or what a worker refused the text with."""
        try:
            async with asyncio.timeout(max(0.0, text.deadline_at - self._clock.now())):
                async with self._turn(text):
                    return await self._run(text)
        except TimeoutError:
            raise DeadlineExpired("The deadline was over before the text was computed.") from None

    async def _run(self, text: Text) -> Told:
        avoid: set[int] = set()
        failed: PdserveError = Unavailable("No worker is ready; try again in a moment.", retry_after_s=1.0)
        for _ in range(TRIES):
            peer = choose_evaluator(
                self._roster.candidates(), self._dispatcher.inflight, frozenset(avoid), near=text.near
            )
            if peer is None:
                break
            try:
                return Told(result=await self._call(peer, text), incarnation=peer.incarnation)
            except _ELSEWHERE as error:
                failed = error
                avoid.add(peer.incarnation)
        raise Unavailable(LOST_MESSAGE, retry_after_s=1.0) if isinstance(failed, Cancelled) else failed

    async def _call(self, peer: PeerRef, text: Text) -> Evaluated:
        link = self._roster.links.get(peer.incarnation)
        if link is None:
            raise Unavailable(LOST_MESSAGE, retry_after_s=1.0)
        message = Evaluate(
            receiver_incarnation=peer.incarnation,
            token_ids=text.token_ids,
            tenant=text.tenant,
            params=text.params,
            cache_salt=text.cache_salt,
            priority=text.priority,
            use_prefix_cache=text.use_prefix_cache,
        )
        with self._counted(peer, len(text.token_ids)):
            try:
                # The caller's own limit ends the call; the worker's is a little later.
                left_s = max(0.0, text.deadline_at - self._clock.now()) + 1.0
                request = evaluate_to_pb(message)
                answer = await link.evaluate.Evaluate(request, timeout=left_s, metadata=text.trace)
                return await asyncio.to_thread(evaluated_from_pb, answer)
            except grpc.RpcError as error:
                found = error_from_rpc(error)
                if isinstance(found, Unavailable) and not isinstance(found, Draining):
                    self._roster.suspect(peer.worker_id, peer.incarnation)
                raise found from None

    @contextmanager
    def _counted(self, peer: PeerRef, num_tokens: int) -> Iterator[None]:
        """The policy sees this work as a prompt's."""
        key = Key(request_id=f"evaluate-{next(self._numbers)}")
        load, worker = self._dispatcher.inflight, peer.incarnation
        load.add(key, decode=worker, prefill=worker, prefill_tokens=num_tokens, decode_tokens=num_tokens)
        try:
            yield
        finally:
            load.release_decode(key)
            self._dispatcher.poke()

    @asynccontextmanager
    async def _turn(self, text: Text) -> AsyncIterator[None]:
        """Waits until few enough are at workers. Raises Overloaded where too many wait."""
        try:
            with self._line.waiting(text.tenant, len(text.token_ids)):
                await self._turns.acquire()
        except Shed as error:
            self._dispatcher.on_shed(error.reason)
            raise
        try:
            yield
        finally:
            self._turns.release()


class Line:
    """How many texts wait, in all and by tenant."""

    def __init__(self, config: RouterConfig) -> None:
        self._most = (config.max_queue, config.max_queue_tokens)
        self._share = config.max_tenant_share
        self._all: tuple[int, int] = (0, 0)
        self._by_tenant: dict[str, tuple[int, int]] = {}

    @contextmanager
    def waiting(self, tenant: str, num_tokens: int) -> Iterator[None]:
        """One more waits, for as long as this lasts. Raises Overloaded where it may not; a tenant's only one
        always may while the whole has room."""
        own = self._by_tenant.get(tenant, (0, 0))
        share = self._share if own[0] else 1.0
        if not self._fits(self._all, num_tokens, 1.0) or not self._fits(own, num_tokens, share):
            message = "Too many texts wait to be computed: come back later."
            raise Shed("texts_full", message, retry_after_s=1.0)
        self._count(tenant, 1, num_tokens)
        try:
            yield
        finally:
            self._count(tenant, -1, -num_tokens)

    def _fits(self, now: tuple[int, int], num_tokens: int, share: float) -> bool:
        return now[0] + 1 <= share * self._most[0] and now[1] + num_tokens <= share * self._most[1]

    def _count(self, tenant: str, texts: int, tokens: int) -> None:
        own = self._by_tenant.pop(tenant, (0, 0))
        self._all = (self._all[0] + texts, self._all[1] + tokens)
        if own[0] + texts:
            self._by_tenant[tenant] = (own[0] + texts, own[1] + tokens)
