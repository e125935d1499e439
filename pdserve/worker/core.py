"""One worker as pure code: pages, step scheduler and roles behind one event interface.

What lives here: routing of events to roles, and when the next step is planned. What does not: the network,
tensors, threads and time; the driver (`pdserve.worker.host`) and the simulator feed events with the time
they happened and carry out the effects in order. Called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.effects import Effect, Retire, RunStep, SetGenerations
from kvtransfer.session.guard import Tombstones
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Report
from pdserve.sched.plan import SeqEvent, SeqStep, StepPlan, StepResult
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import Key

QUARANTINE_BUDGET = 0.05
"""Share of the pool that may be quarantined; over it the worker drains and ends (protocol.md §1)."""
LAST_WORDS_S = 0.5
"""Time for the last answers to leave before a drained worker ends."""

REST_S = 0.01
"""Bookkeeping that nobody waits for comes this much later: messages leave and steps begin first."""


class Role(Protocol):
    """What the core needs of a role; its own inputs (Reserve, Prefill, …) are called on the role itself."""

    draining: bool
    stones: Tombstones

    @property
    def num_live(self) -> int:
        """Keys that are not done, those that only wait for quiet included."""
        ...

    @property
    def num_active(self) -> int:
        """Keys that can still make progress."""
        ...

    @property
    def leases(self) -> tuple[int, int]:
        """Keys whose other worker must be heard of within a lease, and pages that may still be announced."""
        ...

    @property
    def put_off(self) -> bool:
        """Whether there is something for `rest` to do."""
        ...

    @property
    def pace_s(self) -> float:
        """Least time from the start of one step to the next that this role asks for now; seconds."""
        ...

    def owns(self, seq_id: str) -> bool:
        """Whether a scheduler event is this role's."""
        ...

    def seq_event(self, event: SeqEvent, now: float) -> list[Effect]:
        """A scheduler event of a sequence that this role submitted."""
        ...

    def stepped(self, step: SeqStep, began: float, ended: float) -> None:
        """A sequence of its took part in a step that ran from `began` to `ended`; comes before its events."""
        ...

    def pool_shrunk(self, now: float) -> list[Effect]:
        """Pages went into quarantine: what does not fit any more ends here."""
        ...

    def report(self, key: Key, now: float) -> Report | None:
        """What is known of a live key; None if it does not live here. Changes nothing."""
        ...

    def tick(self, now: float) -> list[Effect]:
        """Fires what is due."""
        ...

    def next_timer(self) -> float:
        """When tick is due next; infinity if never."""
        ...

    def rest(self) -> None:
        """Does what it put off: bookkeeping that nobody waits for; see REST_S."""
        ...


class WorkerCore:
    """The roles of one worker on one pool and one scheduler."""

    def __init__(
        self,
        pages: PageManager,
        scheduler: StepScheduler,
        roles: Sequence[Role],
        *,
        max_gap_s: float = float("inf"),
    ) -> None:
        """max_gap_s: a longer silence of our own (no input, no tick) ends this incarnation."""
        self.pages = pages
        self.scheduler = scheduler
        self.draining = False
        self.retired = False
        self._roles = tuple(roles)
        self._max_gap_s = max_gap_s
        self._last_at: float | None = None
        self._quiet_at = float("inf")
        self._num_quarantined = 0
        self._running: StepPlan | None = None
        self._step_at = float("-inf")
        self._resume_at = float("inf")
        self._rest_at = float("inf")

    @property
    def idle(self) -> bool:
        """No key lives, no step runs, and every page is free or evictable."""
        return self._running is None and self.num_live == 0 and self.pages.idle

    @property
    def num_live(self) -> int:
        return sum(role.num_live for role in self._roles)

    @property
    def drained(self) -> bool:
        """Nothing of anybody's is left: no key live or closing, no step, no page that a peer may still touch
        or that is still being written (protocol.md §4), and no bookkeeping is put off."""
        quiet = self._running is None and not any(role.put_off for role in self._roles)
        return quiet and self.num_live == 0 and self.pages.num_pins == 0

    @property
    def over_quarantine(self) -> bool:
        """Whether so many pages are out of use that this incarnation should end."""
        return self.pages.num_quarantined > QUARANTINE_BUDGET * self.pages.num_pages

    @property
    def num_closing(self) -> int:
        """Keys that only wait until compute and reads are quiet."""
        return self.num_live - sum(role.num_active for role in self._roles)

    @property
    def num_tombstones(self) -> int:
        return sum(len(role.stones) for role in self._roles)

    @property
    def busy(self) -> bool:
        """Whether a step runs."""
        return self._running is not None

    def drain(self) -> None:
        """From now on new requests are refused; live ones go on."""
        self.draining = True
        for role in self._roles:
            role.draining = True

    def settle(self, effects: list[Effect], now: float) -> list[Effect]:
        """Completes an input: events it caused in the scheduler, then the next step if one can run.

        After a gap of our own nothing of that gets out, only Retire, and after Retire nothing at all.
        """
        if self._over(now):
            return self._gap_found()
        return [] if self.retired else self._settle(effects, now)

    def _settle(self, effects: list[Effect], now: float) -> list[Effect]:
        self._rest(now)
        if self.pages.num_quarantined > self._num_quarantined:
            self._num_quarantined = self.pages.num_quarantined
            effects = effects + [effect for role in self._roles for effect in role.pool_shrunk(now)]
        out = effects + self._route(self.scheduler.drain_events(), now)
        if self._running is None and not self._paced(now):
            self._running = self.scheduler.plan()
            out += self._route(self.scheduler.drain_events(), now)
            if self._running is not None:
                self._step_at = now
                out.insert(0, RunStep(plan=self._running))  # compute first: the rest goes on beside it
        return self._wear_out(now) or self._generations() + out

    def _rest(self, now: float) -> None:
        """Lets the roles do what they put off before; what they put off just now gets its time."""
        if now >= self._rest_at:
            for role in self._roles:
                role.rest()
        put_off = any(role.put_off for role in self._roles)
        self._rest_at = min(self._rest_at, now + REST_S) if put_off else float("inf")

    def _over(self, now: float) -> bool:
        """Whether we were silent for too long: others have given us up by now (protocol.md §3)."""
        last, self._last_at = self._last_at, now
        return last is not None and now - last > self._max_gap_s

    def _gap_found(self) -> list[Effect]:
        return self._retire("no input and no tick for longer than a lease")

    def _retire(self, reason: str) -> list[Effect]:
        if self.retired:
            return []
        self.retired = True
        return [Retire(reason=reason)]

    def _wear_out(self, now: float) -> list[Effect]:
        """Over the quarantine budget: takes no more, and ends when the last key has ended."""
        if not self.over_quarantine:
            return []
        self.drain()
        if self._running is not None or any(role.num_active for role in self._roles):
            self._quiet_at = float("inf")
            return []
        self._quiet_at = min(self._quiet_at, now + LAST_WORDS_S)
        return self._retire("too many pages are quarantined") if now >= self._quiet_at else []

    def _paced(self, now: float) -> bool:
        """Whether the next step waits a little. Prompts of our own never wait."""
        self._resume_at = float("inf")
        if not self.scheduler.num_running or self.scheduler.waiting_tokens:
            return False
        due = self._step_at + max(role.pace_s for role in self._roles)
        if now >= due:
            return False
        self._resume_at = due
        return True

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """The running step ended; roles learn what it made and the next one is planned."""
        if self.retired or self._over(now):
            return self._gap_found()
        self._stamp(result, now)
        self._running = None
        return self.settle(self._route(self.scheduler.finish_step(result), now), now)

    def _stamp(self, result: StepResult, now: float) -> None:
        """Tells the roles when the step ran: the ledger's chunks."""
        began = self._step_at if result.began_s is None else result.began_s
        ended = now if result.ended_s is None else result.ended_s
        for step in self._running.seqs if self._running is not None else ():
            for role in self._roles:
                if role.owns(step.seq_id):
                    role.stepped(step, began, ended)

    def tick(self, now: float) -> list[Effect]:
        """Time passed. Call it only after the inbox is drained (protocol.md §5)."""
        if self.retired or self._over(now):
            return self._gap_found()
        return self.settle([effect for role in self._roles for effect in role.tick(now)], now)

    def next_timer(self) -> float:
        """When tick is due next; infinity if never. Often enough that idleness is no gap."""
        if self.retired:
            return float("inf")
        alive = (self._last_at or 0.0) + self._max_gap_s / 4
        return min(
            self._resume_at,
            self._quiet_at,
            self._rest_at,
            alive,
            *(role.next_timer() for role in self._roles),
        )

    def report(self, key: Key, now: float) -> Report | None:
        """What is known of a live key; None if it does not live here."""
        found = (role.report(key, now) for role in self._roles)
        return next((report for report in found if report is not None), None)

    def check_integrity(self) -> str:
        """Empty if the pool's states add up, else what is wrong."""
        return self.pages.check_integrity()

    def _generations(self) -> list[Effect]:
        changed = self.pages.changed_generations()
        return [SetGenerations(updates=tuple(changed))] if changed else []

    def _route(self, events: Sequence[SeqEvent], now: float) -> list[Effect]:
        out: list[Effect] = []
        for event in events:
            for role in self._roles:
                if role.owns(event.seq_id):
                    out += role.seq_event(event, now)
        return out
