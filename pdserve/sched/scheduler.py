"""The step scheduler: continuous batching with chunked prefill, as decisions in plain data. Pure.

It owns the order of work and the block tables of one worker's sequences; pages themselves belong to the
`PageManager`, computing to the engine, and everything about requests and transfers to the roles. Page
binding is in `binding`, admission and preemption in `admission`, row counts in `budget`.
"""

from __future__ import annotations

from pdserve.errors import InternalError
from pdserve.kvcache.allocator import Holder
from pdserve.kvcache.manager import PageManager
from pdserve.sched.admission import Admission
from pdserve.sched.binding import PageBinder
from pdserve.sched.budget import Budget
from pdserve.sched.config import SchedConfig, pages_needed
from pdserve.sched.outcome import Outcomes
from pdserve.sched.plan import SeqEvent, SeqSpec, SeqStep, StepPlan, StepResult
from pdserve.sched.roster import Roster
from pdserve.sched.sequence import Seq, check_spec, evaluate_step

__all__ = ["SchedConfig", "StepScheduler", "pages_needed"]


class StepScheduler:
    """Plans one step at a time. Only the control thread calls it.

    Pages that it takes are held under Holder(REQUEST, seq_id). After SeqFinished, SeqFailed, SeqStopped or a
    cancel that returned True the role drops them (`PageManager.drop_all`); a preemption drops them here.
    """

    def __init__(self, config: SchedConfig, manager: PageManager) -> None:
        self.config = config
        self._manager = manager
        self._roster = Roster()
        self._events: list[SeqEvent] = []
        self._binder = PageBinder(config, manager)
        self._admission = Admission(config, self._roster, self._binder, self._events)
        self._outcomes = Outcomes(config, self._roster, self._binder)
        self._in_flight: StepPlan | None = None
        self._in_step: frozenset[str] = frozenset()
        self._num_steps = 0
        self._num_submitted = 0

    # ---- changes -------------------------------------------------------------------------------------

    def submit(self, spec: SeqSpec) -> None:
        """Takes a sequence in; it starts in a later `plan`. Raises InternalError for a spec that can not run
        or an id that is live."""
        if self.has(spec.seq_id):
            raise InternalError("a sequence was submitted twice")
        check_spec(spec, self.config.page_size)
        self._num_submitted += 1
        seq = Seq(spec, self._num_submitted)
        seq.need_not_compute(self._binder.cached_rows(seq))
        self._roster.add(seq)

    def cancel(self, seq_id: str) -> bool:
        """Stops a sequence. True: it is out (or was not here), nothing computes on its pages. False: it is in
        the running step, and SeqStopped follows from `finish_step`."""
        seq = self._roster.get(seq_id)
        if seq is None:
            return True
        if seq_id in self._in_step:
            seq.cancelled = True
            return False
        self._roster.remove(seq)
        return True

    def reserve(self, num_pages: int, holder: Holder) -> tuple[int, ...] | None:
        """Pages for a sequence to be submitted later; they leave `floor_pages` to prompts computed here."""
        return self._manager.reserve(num_pages, holder, keep_back=self.config.floor_pages)

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can run or a step is in flight. Call `drain_events` after it."""
        if self._in_flight is not None:
            return None
        self._admission.grow()
        self._admission.admit()
        shares = self._shares()
        if not shares:
            return None
        self._num_steps += 1
        self._in_flight = self._step(shares)
        self._in_step = frozenset(step.seq_id for step in self._in_flight.seqs)
        return self._in_flight

    def finish_step(self, result: StepResult) -> list[SeqEvent]:
        """Takes the running step's result in; returns what it meant for each sequence, in the plan's order.
        Raises InternalError when it is not the result of the running step."""
        plan = self._in_flight
        if plan is None or result.step_id != plan.step_id:
            raise InternalError("a step result does not belong to the running step")
        self._in_flight = None
        self._in_step = frozenset()
        return [event for step in plan.seqs for event in self._outcomes.settle(step, result)]

    def drain_events(self) -> list[SeqEvent]:
        """Events made by `plan`: Started, PageReady of cache hits, Preempted; in order."""
        events = self._events[:]
        self._events.clear()
        return events

    # ---- questions -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Backlog: prompt rows still to compute, of waiting and of running sequences."""
        running = sum(seq.remaining for seq in self._roster.running.values() if seq.remaining > 1)
        return running + sum(seq.remaining for seq in self._roster.waiting)

    def has(self, seq_id: str) -> bool:
        """Whether the sequence is waiting, running or about to stop."""
        return self._roster.get(seq_id) is not None

    def pages_of(self, seq_id: str) -> tuple[int, ...]:
        """The sequence's block table; () while it has no pages or when it is not here."""
        seq = self._roster.get(seq_id)
        return seq.pages if seq is not None else ()

    # ---- inside --------------------------------------------------------------------------------------

    def _shares(self) -> list[tuple[Seq, int]]:
        """(sequence, rows) of the step: decode rows first, then chunks, both in order of service."""
        size = self.config.page_size
        seqs = [seq for seq in self._roster.by_rank() if not seq.missing_pages(size)]
        single = [(seq, 1) for seq in seqs if seq.remaining == 1]
        budget = Budget(self.config, len(single))
        chunks = [(seq, budget.share(seq)) for seq in seqs if seq.remaining > 1]
        return single + [(seq, rows) for seq, rows in chunks if rows]

    def _step(self, shares: list[tuple[Seq, int]]) -> StepPlan:
        zero: list[int] = []
        copies: list[tuple[int, int]] = []
        steps = []
        for seq, rows in shares:
            zero.extend(self._binder.open_rows(seq, seq.num_computed + rows))
            copies.extend(seq.copies)
            seq.copies = ()
            steps.append(_seq_step(seq, rows))
        return StepPlan(
            step_id=self._num_steps, seqs=tuple(steps), zero_pages=tuple(zero), copies=tuple(copies)
        )


def _seq_step(seq: Seq, rows: int) -> SeqStep:
    start = seq.num_computed
    evaluate = seq.spec.evaluate
    sample = rows == seq.remaining and evaluate is None
    return SeqStep(
        seq_id=seq.seq_id,
        token_ids=tuple(seq.tokens[start : start + rows]),
        start=start,
        pages=seq.pages,
        sample=sample,
        sample_counter=seq.num_completion,
        sampling=seq.spec.sampling,
        history=seq.history() if sample else None,
        evaluate=None if evaluate is None else evaluate_step(seq, evaluate, rows),
    )
