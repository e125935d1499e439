"""Evaluate: tokens run through the model beside all other work, for log-probabilities or a vector.

What lives here: the role (pure) that has such sequences in the step scheduler and adds up what steps made of
them, and its gRPC service. What does not: the figures of a step (`pdserve.engine.evaluate`). Nothing is
handed over, so there is no ticket: as for Drain, the caller is known to be a member of the fleet.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import ServicerContext

from kvtransfer.effects import AnswerEvaluate, Count, Effect
from kvtransfer.measures import prompt_tokens
from kvtransfer.port import Input, WorkerPort
from kvtransfer.session.guard import RoleContext, Tombstones, cache_salt
from pdserve.errors import (
    Draining,
    InternalError,
    NeverFits,
    Overloaded,
    PdserveError,
    PromptTooLong,
    StalePeer,
    Unavailable,
)
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Evaluate, Evaluated, Refusal, Report
from pdserve.obs.catalogue import worker as metrics
from pdserve.obs.work import BROKEN
from pdserve.rpc import convert
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import evaluate_pb2, evaluate_pb2_grpc
from pdserve.sched.plan import (
    EvaluatedRows,
    Preempted,
    SeqEvent,
    SeqFailed,
    SeqFinished,
    SeqKind,
    SeqSpec,
    SeqStep,
    SeqStopped,
    Started,
    StepPlan,
    StepResult,
)
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import Key, Pooling, SamplingParams, TokenLogprob

Call = Evaluate
PREFIX = "E:"
SERVICE = "pdserve.rpc.v1.EvaluateService"
MAX_LIVE = 256
"""Texts that may wait or be computed here, of all routers together."""
Context = ServicerContext[Any, Any]


_REASONS: Mapping[type[PdserveError], Refusal] = {
    StalePeer: Refusal.STALE_INCARNATION,
    Draining: Refusal.DRAINING,
    PromptTooLong: Refusal.NEVER_FITS,
    NeverFits: Refusal.NEVER_FITS,
    Overloaded: Refusal.FULL,
}
"""What a refused evaluation counts as: all that `EvaluateRole.refusal` says."""


@dataclass(slots=True)
class _Entry:
    """One call and what steps have made of it so far."""

    call: Evaluate
    cached_tokens: int = 0
    started: bool = False
    cancelled: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    total: tuple[float, ...] = ()

    def add(self, rows: EvaluatedRows) -> None:
        """A step's part, in order."""
        self.logprobs += rows.logprobs
        total = rows.hidden_sum
        self.total = tuple(a + b for a, b in zip(self.total, total, strict=True)) if self.total else total

    def restart(self, cached_tokens: int = 0) -> None:
        """From the start, or from what the cache has, which no asked-for row is part of."""
        self.cached_tokens = cached_tokens
        self.logprobs.clear()
        self.total = ()

    def result(self) -> Evaluated:
        """All of it."""
        count = len(self.call.token_ids) if self.call.params.pooling is Pooling.MEAN else 1
        vector = tuple(value / count for value in self.total)
        return Evaluated(logprobs=tuple(self.logprobs), vector=vector, cached_tokens=self.cached_tokens)


class EvaluateRole:
    """All live evaluations of one worker. Called by the control thread only."""

    put_off = False
    pace_s = 0.0

    def __init__(self, ctx: RoleContext, pages: PageManager, scheduler: StepScheduler) -> None:
        self._ctx, self._pages, self._scheduler = ctx, pages, scheduler
        self._live: dict[str, _Entry] = {}
        self.draining = False
        self.stones = Tombstones()  # stays empty: these calls have no keys

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_active(self) -> int:
        return sum(not entry.cancelled for entry in self._live.values())

    @property
    def leases(self) -> tuple[int, int]:
        """None: nobody else has a part in these calls."""
        return 0, 0

    def owns(self, seq_id: str) -> bool:
        """Whether a scheduler event is this role's."""
        return seq_id.startswith(PREFIX)

    # -- inputs -----------------------------------------------------------------------------------------

    def refusal(self, call: Evaluate) -> PdserveError | None:
        """Why this call is not taken now; None if it is. Changes nothing."""
        num_tokens = len(call.token_ids)
        if call.receiver_incarnation != self._ctx.incarnation:
            return StalePeer("this worker was restarted since")
        if self.draining:
            return Draining("this worker takes no new requests", retry_after_s=1.0)
        if num_tokens > self._ctx.max_context:
            return PromptTooLong(f"{num_tokens} tokens are more than a context of {self._ctx.max_context}")
        if self._ctx.num_pages(num_tokens) > self._pages.num_usable:
            return NeverFits("the tokens do not fit this worker's page pool")
        if len(self._live) >= MAX_LIVE:
            return Overloaded("this worker evaluates as many texts as it can", retry_after_s=1.0)
        return None

    def evaluate(self, seq_id: str, call: Evaluate, now: float) -> list[Effect]:
        """Takes a call that was not refused; answered by AnswerEvaluate unless it is cancelled."""
        self._live[seq_id] = _Entry(call)
        spec = SeqSpec(
            seq_id=seq_id, kind=SeqKind.EVALUATE, token_ids=call.token_ids, num_prompt=len(call.token_ids),
            sampling=SamplingParams(), arrival=now, use_prefix_cache=call.use_prefix_cache,
            cache_salt=cache_salt(call.tenant, call.cache_salt), priority=call.priority, evaluate=call.params,
        )  # fmt: skip
        self._scheduler.submit(spec)
        return []

    def cancel(self, seq_id: str) -> list[Effect]:
        """Nobody waits for it any more. It is gone at once, or with the running step."""
        entry = self._live.get(seq_id)
        if entry is not None:
            entry.cancelled = True
            if self._scheduler.cancel(seq_id):
                self._forget(seq_id)
        return []

    def computed(self, rows: Mapping[str, EvaluatedRows]) -> list[Effect]:
        """What the step now ending made, before it is told of."""
        for seq_id, of_seq in rows.items():
            if seq_id in self._live:
                self._live[seq_id].add(of_seq)
        return []

    def seq_event(self, event: SeqEvent, now: float) -> list[Effect]:
        """A scheduler event of a sequence that this role submitted."""
        entry = self._live.get(event.seq_id)
        if entry is None:
            return []
        match event:
            case Started():
                again, entry.started = entry.started, True
                entry.restart(event.hit_tokens)
                return [] if again else prompt_tokens("prefix_hit", event.hit_tokens)
            case Preempted():
                entry.restart()
                return [Count(name="retractions")]
            case SeqFinished():
                return self._answer(event.seq_id, entry.result())
            case SeqFailed():
                return self._answer(
                    event.seq_id, InternalError(f"The text was not computed: {event.message}.")
                )
            case SeqStopped():
                self._forget(event.seq_id)
            case _:
                pass
        return []

    def pool_shrunk(self, now: float) -> list[Effect]:
        """Pages went into quarantine: what does not fit any more is computed elsewhere."""
        gone = Unavailable("The text does not fit this worker any more; try again.", retry_after_s=1.0)
        out: list[Effect] = []
        for seq_id, entry in tuple(self._live.items()):
            if self._ctx.num_pages(len(entry.call.token_ids)) > self._pages.num_usable:
                self.cancel(seq_id)
                out.append(AnswerEvaluate(call_id=seq_id, result=gone))
        return out

    # -- what the core asks of every role ---------------------------------------------------------------

    def stepped(self, step: SeqStep, began: float, ended: float) -> None:
        """There is no ledger of evaluations."""

    def report(self, key: Key, now: float) -> Report | None:
        """These calls have no keys."""
        return None

    def tick(self, now: float) -> list[Effect]:
        """Nothing is ever due: the call's own deadline ends it."""
        return []

    def next_timer(self) -> float:
        return float("inf")

    def rest(self) -> None:
        """Nothing is put off."""

    # -- inside -----------------------------------------------------------------------------------------

    def _answer(self, seq_id: str, result: Evaluated | PdserveError) -> list[Effect]:
        self._forget(seq_id)
        return [AnswerEvaluate(call_id=seq_id, result=result)]

    def _forget(self, seq_id: str) -> None:
        del self._live[seq_id]
        self._pages.drop_all(Holder(HolderKind.REQUEST, seq_id))


class EvaluateDriver(evaluate_pb2_grpc.EvaluateServiceServicer):
    """Drives one EvaluateRole. Lives on the control thread."""

    def __init__(self, port: WorkerPort) -> None:
        parts = port.parts
        self._port = port
        self.role = EvaluateRole(parts.context, parts.pages, parts.scheduler)
        self._calls: dict[str, asyncio.Future[Evaluated]] = {}
        self._numbers = itertools.count()
        port.on(AnswerEvaluate, self._answer)
        port.after_step(self._after_step)

    def services(self, server: RpcServer) -> tuple[str, ...]:
        """Adds EvaluateService."""
        evaluate_pb2_grpc.add_EvaluateServiceServicer_to_server(self, server.server)
        return (SERVICE,)

    async def start(self, control: str) -> dict[str, str]:
        """It has no data plane."""
        return {}

    async def stop(self) -> None:
        """Nothing to close."""

    async def Evaluate(  # noqa: N802
        self, request: evaluate_pb2.EvaluateRequest, context: Context
    ) -> evaluate_pb2.EvaluateResponse:
        """Router → here. A broken call is a cancel. Raises what `EvaluateRole.refusal` says."""
        call, came_at, error = convert.evaluate_from_pb(request), self._port.loop.time(), BROKEN
        try:
            answer = await self._run(call)
            error = ""
            return answer
        except PdserveError as failed:
            error = failed.label
            raise
        finally:
            self._port.parts.works.evaluated(context, came_at, len(call.token_ids), error)

    async def _run(self, call: Call) -> evaluate_pb2.EvaluateResponse:
        refusal = self.role.refusal(call)
        if refusal is not None:
            self._port.measure(metrics.REFUSALS, 1, (_REASONS[type(refusal)],))
            raise refusal
        call_id = f"{PREFIX}{next(self._numbers)}"
        future = self._calls[call_id] = self._port.loop.create_future()
        try:
            self._port.feed(lambda now: self.role.evaluate(call_id, call, now))
            return await asyncio.to_thread(convert.evaluated_to_pb, await future)
        except asyncio.CancelledError:
            self._port.feed(lambda now: self.role.cancel(call_id))
            raise
        finally:
            del self._calls[call_id]

    def _answer(self, effect: AnswerEvaluate) -> None:
        future = self._calls.get(effect.call_id)
        if future is None or future.done():
            return
        if isinstance(effect.result, PdserveError):
            future.set_exception(effect.result)
        else:
            future.set_result(effect.result)

    def _after_step(self, plan: StepPlan, result: StepResult) -> Input:
        """Compute thread: the rows travel beside the result."""
        rows = result.evaluated
        return lambda now: self.role.computed(rows)
