"""A router without its sockets: validates, queues, runs and reports requests. Services are thin over it."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from pdserve import failpoints
from pdserve.api import (
    Admitted,
    End,
    Explanation,
    FleetStatus,
    GenerateInput,
    ModelInfo,
    StreamEvent,
    WorkerStatus,
)
from pdserve.clock import Clock
from pdserve.errors import Draining, InternalError, PdserveError, Unavailable, UnknownModel, UnknownRequest
from pdserve.messages import Outcome
from pdserve.obs.catalogue import router as names
from pdserve.obs.metrics import Readings
from pdserve.tls import TlsSource
from pdserve.types import ModelLimits
from router import events as ev
from router.bad_words import spelled
from router.beam_stream import beams
from router.caller import ANONYMOUS, Caller
from router.calls import Tasks
from router.choices import best_of, several, single
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.evaluate import Evaluator
from router.explain import MAX_EXPLAINED, Explained
from router.fleet_gauges import FleetGauges
from router.job import Job, Watched
from router.metrics import RouterMetrics
from router.model import ServedModel
from router.prompt import prompt_info
from router.record import GenerateRecord, Recorder
from router.request import Services, Shared
from router.roster import Roster
from router.tickets import TicketMint
from router.validate import Target, check_fields, check_prompt, with_bad_words

log = logging.getLogger(__name__)

TICK_S = 0.25
MAX_REMEMBERED = 4096
_ABORTED = ev.AbortAsked()
_SHUT_DOWN = ev.AbortAsked(label="draining", message="The router shuts down; send the request again.")


class Hub:
    """All of one router's state. Owned by one event loop."""

    def __init__(self, config: RouterConfig, clock: Clock, tls: TlsSource | None = None) -> None:
        """tls: our certificate. Raises ConfigError if there is no usable fleet secret."""
        self.config = config
        self.router_id = secrets.token_hex(8)
        self.metrics = RouterMetrics(slo_ttft_s=config.slo_ttft_s, slo_itl_s=config.slo_itl_s)
        secret = config.secret_bytes()
        self.roster = Roster(config, clock, self.router_id, secret, tls)
        self._clock, self._started_at = clock, clock.now()
        self._tasks = Tasks()
        self._services = Services(
            roster=self.roster,
            dispatcher=Dispatcher(config, self.roster, clock),
            tasks=self._tasks,
            tickets=TicketMint(secret=secret, lease_s=config.lease_s),
            metrics=self.metrics,
            clock=clock,
        )
        self.recorder = Recorder(config, self.router_id)
        self._jobs: dict[str, Job] = {}
        self._watched = Watched(runs={}, explained=Explained())
        self.evaluator = Evaluator(config, self.roster, self._services.dispatcher, clock)
        self._guests = 0
        self._ended: OrderedDict[str, str] = OrderedDict()  # tenant by request id
        self._arrivals = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.closed = asyncio.Event()
        self.on_ready: Callable[[bool], None] = lambda ready: None
        self.roster.on_lost, self.roster.on_change = self._on_lost, self._on_change
        self._services.dispatcher.on_shed = self.metrics.shed
        gauges = FleetGauges(self.roster, self._services.dispatcher, insecure=config.insecure)
        self.metrics.watch(gauges.read)
        self.metrics.watch(self._read_counts)
        if config.vllm_metrics:
            self.metrics.add_vllm_names(gauges.vllm_facts)

    def start(self) -> None:
        """Begins to watch the clock. Call it in the running loop."""
        self._tasks.spawn(self._tick())

    # -- requests --------------------------------------------------------------------------------------

    async def generate(
        self, source: GenerateInput, time_left_s: float | None = None, caller: Caller = ANONYMOUS
    ) -> AsyncIterator[StreamEvent]:
        """One request's events; closing the iterator cancels. time_left_s: of the caller's own deadline.

        Raises the PdserveError that the request was refused with or ended in.
        """
        outcome: str = "cancelled"  # unless it ends otherwise before the client goes away
        failed: PdserveError | None = None
        job: Job | None = None
        record = self.recorder.begin(source, self._clock.now())
        try:
            job = await self._prepare(source, time_left_s, caller, record)
            self._enter(job)
            async with aclosing(_answer(job)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, End):
                        outcome = event.finish_reason
                        seconds = self._clock.now() - job.shared.started_at
                        self.metrics.finished(job.mode, seconds, event.usage)
                    record.saw(event)
                    yield event
                    if isinstance(event, Admitted) and (source.echo or source.prompt_logprobs is not None):
                        yield await job.beside(prompt_info(job, source, self.evaluator))
        except PdserveError as error:
            outcome, failed = error.label, error
            raise
        except Exception:
            outcome = InternalError.label
            raise
        finally:
            self.metrics.outcome(outcome)
            found = None if job is None else self._exit(job, failed)
            record.ended(outcome, caller.tenant, found, model=self.model_name, now=self._clock.now())

    async def _prepare(
        self, source: GenerateInput, time_left_s: float | None, caller: Caller, record: GenerateRecord
    ) -> Job:
        if wait_s := failpoints.stall_s("tokenise"):
            await asyncio.sleep(wait_s)
        self._check_open()
        model = self._model()
        target = Target(model=model.name, limits=self.bounded(model.limits), capacity=self.roster.capacity())
        checked = check_fields(source, target, seed=secrets.randbits(64))
        if source.bad_words:
            checked = with_bad_words(checked, await spelled(model, source.bad_words))
        prompt = await model.prompt(source)
        request = check_prompt(checked, prompt.ids, target, prompt.chat)
        await model.check_grammar(caller.tenant, request)
        self._arrivals += 1
        limit_s = min(request.deadline_s, math.inf if time_left_s is None else time_left_s)
        shared = Shared(
            tenant=caller.tenant,
            arrival=self._arrivals,
            started_at=record.began_at,
            deadline_at=record.began_at + limit_s,
            trace=record.headers,
        )
        request = replace(request, trace_id=record.trace_id)
        return Job(self._services, model, request, shared, self._watched)

    def _check_open(self) -> None:
        if self.draining:
            raise Draining(_SHUT_DOWN.message, retry_after_s=1.0)

    @property
    def model_name(self) -> str:
        """Of the model that is served; empty before a worker has registered."""
        return "" if self.roster.model is None else self.roster.model.name

    def _model(self) -> ServedModel:
        if self.roster.model is None:
            raise Unavailable("No worker has registered yet; try again in a moment.", retry_after_s=1.0)
        return self.roster.model

    def bounded(self, limits: ModelLimits) -> ModelLimits:
        """The model's limits, with a context no longer than we may accept."""
        longest = self.config.max_model_len or limits.max_context
        return replace(limits, max_context=min(limits.max_context, longest))

    def _enter(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        self._idle.clear()

    def _exit(self, job: Job, failed: PdserveError | None) -> Explanation:
        del self._jobs[job.request_id]
        found = job.ended(failed)
        self._watched.explained.put(job.tenant, found)
        self._ended[job.request_id] = job.tenant
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._note_idle()
        return found

    @contextmanager
    def guest(self) -> Iterator[None]:
        """For a request that is no generation: refused with Draining, or waited for, when we shut down."""
        self._check_open()
        self._guests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._guests -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._jobs and not self._guests:
            self._idle.set()

    def abort(self, request_id: str, caller: Caller = ANONYMOUS) -> Outcome:
        """Ends a request of the caller's tenant. UNKNOWN proves nothing: ended requests are remembered only
        for a while."""
        job = self._jobs.get(request_id)
        if job is None or job.tenant != caller.tenant:
            ended = job is None and self._ended.get(request_id) == caller.tenant
            return Outcome.COMPLETE if ended else Outcome.UNKNOWN
        job.abort(_ABORTED)
        return Outcome.STOPPING

    async def explain(self, request_id: str, caller: Caller = ANONYMOUS) -> Explanation:
        """Where a request of the caller's tenant spent its time, or spends it. Raises UnknownRequest: never
        here, or too long ago."""
        job, run = self._jobs.get(request_id), self._watched.runs.get(request_id)
        if job is not None and job.tenant == caller.tenant:
            return await job.explain()
        if run is not None and run.tenant == caller.tenant:
            return run.explain(await run.ask_workers())
        found = self._watched.explained.get(caller.tenant, request_id)
        if found is None:
            raise UnknownRequest(
                f"request_id: this router knows no such request; it remembers the last {MAX_EXPLAINED}."
            )
        return found

    # -- questions -------------------------------------------------------------------------------------

    def now(self) -> float:
        """The router's clock."""
        return self._clock.now()

    def model_info(self, name: str = "") -> ModelInfo:
        """Raises UnknownModel, or Unavailable before the first worker has registered."""
        model = self.served(name)
        return replace(model.info, limits=self.bounded(model.limits))

    def served(self, name: str = "") -> ServedModel:
        """The model of that name, "" for the one there is. Raises as `model_info`."""
        model = self._model()
        if name and name != model.name:
            raise UnknownModel(
                "model: this server does not serve that model; leave it empty to ask for its own."
            )
        return model

    def status(self) -> FleetStatus:
        """What this router knows of its fleet."""
        now = self._clock.now()
        queued, running = self._counts()
        return FleetStatus(
            router_id=self.router_id,
            workers=tuple(self._worker_status(member.incarnation, now) for member in self.roster.members()),
            queued=queued,
            running=running,
            uptime_s=now - self._started_at,
            draining=self.draining,
            pairing_problems=self.roster.pairing_problems(),
            traffic=self.metrics.traffic(),
        )

    def _worker_status(self, incarnation: int, now: float) -> WorkerStatus:
        member = next(m for m in self.roster.members() if m.incarnation == incarnation)
        load = self._services.dispatcher.inflight.load(incarnation)
        return WorkerStatus(
            record=member.record,
            load=member.load,
            outstanding_tokens=load.prefill_tokens + load.decode_tokens,
            outstanding_requests=max(load.prefill_requests, load.decode_requests),
            heartbeat_age_s=max(0.0, now - member.heard_at),
            suspect=self.roster.is_suspect(member),
        )

    def _counts(self) -> tuple[int, int]:
        queued = self._services.dispatcher.num_queued
        return queued, max(0, len(self._watched.runs) - queued) + self._guests

    def _read_counts(self, into: Readings) -> None:
        queued, running = self._counts()
        into.set(names.QUEUED, queued)
        into.set(names.RUNNING, running)

    # -- what happens to workers -----------------------------------------------------------------------

    def _on_lost(self, incarnation: int) -> None:
        self._services.dispatcher.forget(incarnation)
        for run in tuple(self._watched.runs.values()):
            run.apply(ev.WorkerGone(incarnation=incarnation))

    @property
    def ready(self) -> bool:
        """Whether a new request has a path."""
        return self.roster.is_ready() and not self.draining

    def _on_change(self) -> None:
        self._services.dispatcher.poke()
        self.on_ready(self.ready)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.roster.tick()
                self._services.dispatcher.tick()
                self._on_change()
            except Exception:
                log.exception("a tick failed; the next one goes on")

    # -- the end ---------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests at once and lets running ones finish, up to `timeout_s`; then ends them."""
        self.draining = True
        self._on_change()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests did not finish in time and are ended", len(self._jobs))
            for job in tuple(self._jobs.values()):
                job.abort(_SHUT_DOWN)

    async def close(self) -> None:
        """Ends all background work and all channels; whoever follows the router sees `closed`."""
        self.closed.set()
        for job in tuple(self._jobs.values()):
            job.abort(_SHUT_DOWN)
        await self._tasks.cancel_all()
        await self.roster.close()
        await asyncio.to_thread(self.recorder.close)


def _answer(job: Job) -> AsyncIterator[StreamEvent]:
    """The events of a request, by what it asks for."""
    wanted = job.request.wanted
    if wanted.beam_width:
        return beams(job)
    if wanted.best_of > wanted.n:
        return best_of(job)
    return several(job, job.request, wanted.n) if wanted.n > 1 else single(job)
