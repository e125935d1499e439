"""When a worker's experts are placed anew: asked to, or by itself when its loads are worth it.

What lives here: looking at the window, having a plan made elsewhere, and steps for a rebalance while nobody
asks for tokens. What does not: planning (`pdserve.parallel.placement`), carrying a plan out
(`pdserve.ranks.rebalancing`). All of it belongs to the control thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from pdserve.api import RebalanceAnswer
from pdserve.errors import InternalError, WorkerLost
from pdserve.parallel.expert_snapshot import ExpertSnapshot
from pdserve.parallel.placement_table import Copy, Placement
from pdserve.parallel.plan_process import Proposal, propose_elsewhere
from pdserve.ranks.rebalancing import RebalanceStatus
from pdserve.worker.experts import ExpertWatch

log = logging.getLogger(__name__)
BUSY_S = 0.02
"""Between two steps without rows while a rebalance is under way."""
LOOK_S = 60.0
"""Between two looks at the loads: a half-life of the window."""
LEAST_TOKENS = 10_000.0
"""Choices of a layer in the window, on average: of fewer the loads say little."""
LEAST_GAIN = 0.01
"""Less than this is not worth one copy, even if asked for."""


class Rebalances(Protocol):
    """What is needed of `pdserve.ranks.rebalancing.Rebalancing`."""

    @property
    def busy(self) -> bool: ...

    @property
    def status(self) -> RebalanceStatus: ...

    def offer(self, table: Placement, copies: tuple[Copy, ...] | None = None) -> None: ...


class ExpertKeeper:
    """Of one worker. step: computes an empty step on the compute thread, unless one runs already."""

    def __init__(
        self,
        name: str,
        watch: ExpertWatch,
        rebalances: Rebalances | None,
        step: Callable[[], Awaitable[None]],
        *,
        least_gain: float,
        propose: Callable[[ExpertSnapshot], Proposal] = propose_elsewhere,
    ) -> None:
        """rebalances: None where experts can not move. least_gain: from which on it acts by itself; 0: never.
        propose: blocks; called on a thread."""
        self._name, self._watch = name, watch
        self._rebalances, self._step = rebalances, step
        self._least_gain, self._propose = least_gain, propose
        self._planning = False
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on it looks by itself."""
        if self._rebalances is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(self._rebalances))

    async def stop(self) -> None:
        """No more plans and steps."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def status(self) -> RebalanceStatus | None:
        """Of the rebalances so far; None where experts can not move."""
        return None if self._rebalances is None else self._rebalances.status

    @property
    def busy(self) -> bool:
        """A plan is being made or carried out."""
        return self._planning or (self._rebalances is not None and self._rebalances.busy)

    async def rebalance(self, now: float, least_gain: float = LEAST_GAIN) -> RebalanceAnswer:
        """Plans for the loads of the window; starts what is worth it. now: monotonic seconds."""
        if self._rebalances is None:
            return self._answer("its experts lie on one rank, or it has none")
        if self.busy:
            return self._answer("a rebalance is under way")
        if self._rebalances.status.lost:
            return self._answer("it goes on without a rank; experts move again once it is whole")
        proposal = await self._plan(now)
        if proposal.gain < least_gain:
            return self._answer("there is nothing to gain", proposal)
        self._rebalances.offer(proposal.table, proposal.copies)
        self._asked.set()
        return self._answer("", proposal)

    async def _plan(self, now: float) -> Proposal:
        """Whoever asked may go away meanwhile: the planner goes on to its end, and there is one at a time."""
        self._planning = True
        planner = asyncio.ensure_future(asyncio.to_thread(self._propose, self._watch.snapshot(now)))
        planner.add_done_callback(self._planned)
        return await asyncio.shield(planner)

    def _planned(self, planner: asyncio.Future[Proposal]) -> None:
        self._planning = False
        if not planner.cancelled():
            planner.exception()  # seen, also if nobody waits for it any more

    def _answer(self, reason: str, proposal: Proposal | None = None) -> RebalanceAnswer:
        return RebalanceAnswer(
            name=self._name,
            started=not reason,
            reason=reason,
            copies=0 if proposal is None else len(proposal.copies),
            gain=0.0 if proposal is None else proposal.gain,
        )

    async def _run(self, rebalances: Rebalances) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_S)
            if not self._asked.is_set():
                await self._look(loop.time())
            self._asked.clear()
            while rebalances.busy:
                await asyncio.sleep(BUSY_S)
                try:
                    await self._step()
                except WorkerLost:
                    return  # the replica is over, and so is this process
            self._watch.moved(rebalances.status.served)

    async def _look(self, now: float) -> None:
        if not self._least_gain or self._watch.mean_tokens(now) < LEAST_TOKENS:
            return
        try:
            await self.rebalance(now, self._least_gain)
        except InternalError:
            log.exception("experts stay where they are")
