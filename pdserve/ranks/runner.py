"""The leader's runner: what a worker computes with when its model lies on several ranks.

What lives here: handing a plan to all ranks and waiting until all have carried it out. What does not: how a
rank computes (`ModelRunner`), how ranks come and go (`replica`).

A step is over when every rank says so, not when rank 0 has its logits: only then is no page written any more.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.engine.runner import ModelRunner
from pdserve.errors import BY_LABEL, InternalError, PdserveError, WorkerLost
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.ranks.frames import Frame, Kind, receive, send
from pdserve.ranks.meeting import RankGroup
from pdserve.ranks.plans import encode_plan
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.survival import Survival
from pdserve.ranks.tender import Tender, Word, decode
from pdserve.sched.plan import StepPlan, StepResult

log = logging.getLogger(__name__)
SERIAL = struct.Struct("<Q")
_VERSION = struct.Struct("<I")
_NOTHING = StepPlan(step_id=0, seqs=())


class ParallelRunner(ModelRunner):
    """A `ModelRunner` that is rank 0 of several. What goes wrong on any rank ends the replica."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        *,
        group: RankGroup,
        ranks: Sequence[socket.socket],
        on_lost: Callable[[str], None],
        **options: Any,
    ) -> None:
        """pool: rank 0's. ranks: connections to the others. on_lost: called when a step can not be finished,
        with a reason in words. options: as ModelRunner's."""
        super().__init__(model, pool, group=group, **options)
        self.traffic = group.traffic
        self._ranks = tuple(ranks)
        self._on_lost = on_lost
        self._serial = 0
        self.rebalancing: Rebalancing | None = None
        self._tender: Tender | None = None
        self._survival: Survival | None = None

    def rebalance_with(
        self, rebalancing: Rebalancing, tender: Tender, survival: Survival | None = None
    ) -> None:
        """From now on experts can change their places. tender: rank 0's. survival: None where a lost rank is
        the end."""
        self.rebalancing, self._tender, self._survival = rebalancing, tender, survival

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that it goes on without, also before the first step without them; any thread."""
        return frozenset() if self._survival is None else self._survival.lost

    def idle_step(self) -> None:
        """A step that computes nothing, for a rebalance while there are no others. Compute thread. Raises
        WorkerLost, as `execute`."""
        self.execute(_NOTHING)

    def execute(self, plan: StepPlan) -> StepResult:
        """As ModelRunner's, on all ranks. Raises WorkerLost, after `on_lost`, when the replica is over: then
        nothing is known of the step, and nobody may go on. A step that lost a rank which can be spared is
        computed again."""
        while True:
            try:
                return self._step(plan)
            except Exception as error:
                if not self._goes_on(error):
                    log.exception("a step of several ranks failed")
                    self._on_lost("a step failed on one of its ranks")
                    raise WorkerLost("this replica is over; it starts again") from error

    def _goes_on(self, error: Exception) -> bool:
        """Whether the ranks that are left have begun anew."""
        if self._survival is None or self.rebalancing is None or not isinstance(error, WorkerLost):
            return False
        try:
            lost, words = self._survival.regroup()
            self._ranks = tuple(self._survival.ranks.values())
            for of_rank in words.values():
                self.rebalancing.hear(of_rank)
            for rank in sorted(lost):
                self.rebalancing.lose(rank)
        except Exception:  # two at once, or experts without a home: whoever waits for this step must be told
            log.exception("a replica can not go on without a rank")
            return False
        return bool(lost)

    def _step(self, plan: StepPlan) -> StepResult:
        self._serial += 1
        serial = SERIAL.pack(self._serial)
        if self.rebalancing is not None:
            self.rebalancing.before_step()
        version = 0 if self.rebalancing is None else self.rebalancing.version
        data = serial + _VERSION.pack(version) + encode_plan(plan)
        for rank in self._ranks:
            send(rank, Kind.PLAN, data)
        result = super().execute(plan)
        told = self._all_done(serial)
        if self.rebalancing is not None and self._tender is not None:
            self.rebalancing.after_step([self._tender.words(), *told])
        return result

    def _all_done(self, serial: bytes) -> list[list[Word]]:
        """Waits until every rank is; what they said beside. What those who are done said counts, even if
        another one is lost: they say it once."""
        told: list[list[Word]] = []
        try:
            for rank in self._ranks:
                told.append(decode(expect_done(receive(rank), serial)))
        except WorkerLost:
            if self.rebalancing is not None:
                for of_rank in told:
                    self.rebalancing.hear(of_rank)
            raise
        return told


def expect_done(frame: Frame, serial: bytes) -> bytes:
    """What a rank says beside that it is done. Raises what it failed with, or WorkerLost for another word."""
    if frame.kind is Kind.FAILED:
        raise failure(frame)
    if frame.kind is Kind.ABORTED:
        raise WorkerLost("a rank of this replica is lost")
    if frame.kind is not Kind.DONE or not frame.body.startswith(serial):
        raise WorkerLost("a rank of this replica is out of step")
    return frame.body[len(serial) :]


def failure(frame: Frame) -> PdserveError:
    """The error that a FAILED frame tells of."""
    told = json.loads(frame.body)
    kind: type[PdserveError] = BY_LABEL.get(told["label"], InternalError)
    return kind(str(told["message"]))
