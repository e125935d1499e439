"""Feeds the pure core of a worker and carries its effects out: the control thread's half of the engine.

What lives here: the lock, the timer, the hop to the compute thread and back. What does not: gRPC services
and the data plane (the role drivers), models (`pdserve.engine`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from kvtransfer.effects import Count, Effect, Measure, Retire, RunStep, SetGenerations
from kvtransfer.port import AfterStep, Input, WorkerParts
from pdserve import failpoints
from pdserve.errors import WorkerLost
from pdserve.obs.catalogue import worker as metrics
from pdserve.obs.catalogue.kinds import Metric
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.worker.core import WorkerCore
from pdserve.worker.metrics import WorkerSums

log = logging.getLogger(__name__)

E = TypeVar("E", bound=Effect)


class Runner(Protocol):
    """What the driver needs of the engine's runner."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries a plan out, on the compute thread."""
        ...


class Driver:
    """`WorkerPort` of one worker. All methods but `feed_soon` belong to the control thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parts: WorkerParts,
        runner: Runner,
        compute: ThreadPoolExecutor,
        on_fatal: Callable[[BaseException], None],
        on_retire: Callable[[str], None],
    ) -> None:
        """on_fatal: the core failed. on_retire: this incarnation is over, for a reason in words."""
        self.parts = parts
        self.loop = loop
        self.lock = threading.Lock()
        self.core: WorkerCore | None = None
        self.sums = WorkerSums()
        self.last_step_at = loop.time()
        self._runner = runner
        self._compute = compute
        self._on_fatal = on_fatal
        self._on_retire = on_retire
        self._handlers: dict[type[Any], Callable[[Any], None]] = {}
        self._after_step: list[AfterStep] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._changed = asyncio.Event()
        self._inbox: deque[Input] = deque()
        self._inbox_due = False
        self.on(RunStep, self._run_step)
        self.on(SetGenerations, self._set_generations)
        self.on(Count, lambda effect: self.sums.count(effect.name, effect.amount))
        self.on(Measure, lambda effect: self.sums.add(effect.metric, effect.value, effect.labels))
        self.on(Retire, self._retire)

    def on(self, effect: type[E], handler: Callable[[E], None]) -> None:
        """Names the one handler of an effect type. Raises ValueError if there is one."""
        if effect in self._handlers:
            raise ValueError(f"{effect.__name__} has a handler")
        self._handlers[effect] = handler

    def after_step(self, hook: AfterStep) -> None:
        """See WorkerPort."""
        self._after_step.append(hook)

    def feed(self, make: Input) -> None:
        """Runs an input of the core now and carries its effects out."""
        assert self.core is not None
        core = self.core
        self._apply(lambda now: core.settle(make(now), now))

    def feed_soon(self, make: Input) -> None:
        """The same from any thread, in the order of the calls. Without effect once the loop is closed."""
        if self.loop.is_closed():
            return
        self._inbox.append(make)
        if not self._inbox_due:  # one wake-up for all that comes before it is answered
            self._inbox_due = True
            self.loop.call_soon_threadsafe(self._drain_inbox)

    def _drain_inbox(self) -> None:
        self._inbox_due = False  # first: what comes from here on asks for a wake-up of its own
        for _ in range(len(self._inbox)):
            self.feed(self._inbox.popleft())

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter; one without any is not made."""
        if amount:
            self.sums.count(name, amount)

    def measure(self, metric: Metric, value: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """See WorkerPort."""
        self.sums.add(metric, value, labels)

    @property
    def counters(self) -> Mapping[str, int]:
        """Events by name; those that never happened are left out."""
        return self.sums.counters

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on the core holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _apply(self, make: Input) -> None:
        now = self.loop.time()
        try:
            with self.lock:
                self.parts.pages.touch_time(now)
                effects = make(now)
            for effect in effects:
                self._handlers[type(effect)](effect)
        except Exception as error:
            # The core's state can not be trusted any more: this incarnation ends (S1 before L1).
            log.critical("the worker's core failed", exc_info=error)
            self._on_fatal(error)
            raise
        self._changed.set()
        self._arm(now)

    def _arm(self, now: float) -> None:
        assert self.core is not None
        due = self.core.next_timer()
        if due >= self._timer_at > now:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_at = due
        if due != float("inf"):
            # Through the queue's end: what is in the inbox by now comes first (protocol.md §5).
            self._timer = self.loop.call_at(due, self.loop.call_soon, self._tick)

    def _tick(self) -> None:
        assert self.core is not None
        self._timer_at = float("inf")
        self._apply(self.core.tick)

    # -- effects every worker has -----------------------------------------------------------------------

    def _run_step(self, effect: RunStep) -> None:
        self.sums.count("steps")
        self.sums.count("step_rows", sum(len(seq.token_ids) for seq in effect.plan.seqs))
        self.last_step_at = self.loop.time()  # an idle time before this step is not the step's
        wait_s = failpoints.stall_s("prefill_queue") if has_chunk(effect.plan) else 0.0
        if wait_s:
            self.loop.call_later(wait_s, self._compute.submit, self._execute, effect.plan)
        else:
            self._compute.submit(self._execute, effect.plan)

    def _execute(self, plan: StepPlan) -> None:
        """Compute thread. A step that fails as a whole fails its sequences, not the engine (S5)."""
        began = self.loop.time()
        failpoints.stall("compute" if has_chunk(plan) else "first_step")
        try:
            result = self._runner.execute(plan)
        except WorkerLost:
            return  # the replica is over, and so is this process: nothing is known of the step
        except Exception as error:
            log.error("a step failed", exc_info=error)
            failed = {seq.seq_id: "the computation failed" for seq in plan.seqs}
            result = StepResult(step_id=plan.step_id, tokens={}, failed=failed)
        result = replace(result, began_s=began, ended_s=self.loop.time())
        found = self._look_after(plan, result)
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._step_done, plan, result, found)

    def _look_after(self, plan: StepPlan, result: StepResult) -> list[Input]:
        try:
            return [hook(plan, result) for hook in self._after_step]
        except Exception:  # they save time; what they did not do is done later
            log.exception("a hook after a step failed")
            return []

    def _step_done(self, plan: StepPlan, result: StepResult, found: list[Input]) -> None:
        assert self.core is not None
        core = self.core
        self.last_step_at = self.loop.time()
        self._measure_step(plan, result)
        self._apply(lambda now: [e for make in found for e in make(now)] + core.step_done(result, now))

    def _measure_step(self, plan: StepPlan, result: StepResult) -> None:
        """What a step was. Rows of a prompt: those of chunks, and one that is the last of a prompt."""
        add, num_rows, num_prompt = self.sums.add, 0, 0
        for step in plan.seqs:
            rows = len(step.token_ids)
            num_rows += rows
            if rows > 1 or not step.sample_counter:
                num_prompt += rows
        add(metrics.STEP, (result.ended_s or 0.0) - (result.began_s or 0.0))
        add(metrics.STEP_SEQUENCES, len(plan.seqs))
        add(metrics.STEP_ROWS, num_rows)
        add(metrics.GENERATED_TOKENS, len(result.tokens))
        if num_prompt:
            add(metrics.PROMPT_TOKENS, num_prompt, ("computed",))

    def _set_generations(self, effect: SetGenerations) -> None:
        for pool in self.parts.pools:
            for page, generation in effect.updates:
                pool.set_generation(page, generation)

    def _retire(self, effect: Retire) -> None:
        log.warning("this incarnation ends: %s", effect.reason)
        self._on_retire(effect.reason)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def has_chunk(plan: StepPlan) -> bool:
    """Whether a step computes a part of a prompt."""
    return any(len(step.token_ids) > 1 for step in plan.seqs)
