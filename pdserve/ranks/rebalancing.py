"""The driver of the rebalancer in a replica: a leader that carries its effects out over all ranks.

What lives here: effects as orders to ranks, words of ranks as events, and who has which lane of the ferry.
What does not: the machine between plan and table (`pdserve.parallel.rebalance`), what a rank does with an
order (`tender`), planning, and when to plan (`pdserve.worker.expert_keeper`).

All ranks get their orders before the same plan, which names the version of the tables that it is to be
computed with. The compute thread calls everything but `offer`, `busy` and `status`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdserve.errors import WorkerLost
from pdserve.parallel.coverage import Coverage
from pdserve.parallel.placement_table import Copy, Placement
from pdserve.parallel.rebalance import RebalanceConfig, Rebalancer
from pdserve.parallel.rebalance_events import (
    CanaryDone,
    CopyDone,
    CopyFailed,
    DropCopies,
    Effect,
    Event,
    Install,
    PlanReady,
    RankLost,
    RunCanary,
    StartCopy,
    StepBoundary,
    Tick,
    Told,
    WantPlan,
)
from pdserve.ranks.ferry import make_ferry
from pdserve.ranks.frames import Kind, send
from pdserve.ranks.tender import Order, Tender, Word, encode

log = logging.getLogger(__name__)
LANES = 2
"""Copies at once: one leaves its source while another reaches its target."""
WAVE_LAYERS = 1
"""Layers that are tried and installed with one step: what a step has to do for it stays a millisecond."""
PATIENCE_STEPS = 8
"""After so many steps a canary that has met no rows in all its layers gets rows of its own."""
LEAST_TIMEOUT_S = 60.0
LEAST_BYTES_PER_S = 5e6
"""A wave that is slower than this, after the least time, has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceStatus:
    """What a worker tells of its rebalances. outcomes: plans that ended, by how. copied_bytes: of weights
    that reached their rank. last: the last plan's end in words. lost: ranks that it goes on without."""

    table: Placement
    outcomes: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: int = 0
    last: str = ""
    lost: frozenset[int] = frozenset()

    @property
    def served(self) -> Placement:
        """The table without the homes on ranks that are lost."""
        return Coverage(table=self.table, lost=self.lost).masked if self.lost else self.table


@dataclass(slots=True, kw_only=True)
class _Trip:
    """A copy on its way. lane: None once its weights are in their block. at: the rank that has the next word.
    dropped: nobody wants it."""

    copy: Copy
    lane: int | None
    at: int
    dropped: bool = False


class Rebalancing:
    """Of one replica; rank 0 is this process."""

    def __init__(
        self,
        table: Placement,
        tender: Tender,
        ranks: Sequence[socket.socket],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """table: with which all ranks were built. ranks: connections to ranks 1 and up, in order."""
        wave_bytes = WAVE_LAYERS * table.num_slots * tender.block_bytes
        config = RebalanceConfig(
            spare_slots=table.slots_per_rank,
            at_once=LANES,
            layers=WAVE_LAYERS,
            timeout_s=LEAST_TIMEOUT_S + wave_bytes / LEAST_BYTES_PER_S,
        )
        self._rebalancer = Rebalancer(table, config)
        self._tender, self._ranks = tender, tuple(ranks)
        self._block_bytes, self._clock = tender.block_bytes, clock
        self._offers: deque[PlanReady] = deque()
        self._orders: list[list[Order]] = [[] for _ in range(len(ranks) + 1)]
        self._lanes = list(range(LANES))
        self._ferry_is_open = False
        self._trips: dict[int, _Trip] = {}
        self._last_trip = 0
        self._waiting: deque[Copy] = deque()
        self._judging = False
        self._judged_steps = 0
        self._table, self._version = table, 0
        self._status = RebalanceStatus(table=table)
        self.ordered: frozenset[str] = frozenset()
        """Kinds of orders that came before the last step; for whoever measures steps."""

    @property
    def status(self) -> RebalanceStatus:
        """At this moment; any thread."""
        return self._status

    @property
    def busy(self) -> bool:
        """Whether steps are wanted, with rows or without; any thread."""
        return bool(self._offers) or self._rebalancer.busy or bool(self._trips)

    @property
    def version(self) -> int:
        """Of the tables of the next step."""
        return self._version

    def offer(self, table: Placement, copies: tuple[Copy, ...] | None = None) -> None:
        """A table to come to; what becomes of it is in `status`. Any thread. copies: from the present table,
        which should share its unchanged layers: then no step waits for them to be found."""
        self._offers.append(PlanReady(table=table, copies=copies))

    def before_step(self) -> None:
        """Sends what ranks are to do before the next plan. Raises WorkerLost."""
        while self._offers:
            self._feed(self._offers[0])
            self._offers.popleft()  # only now: it is busy all the time
        if self._rebalancer.busy:
            self._feed(Tick())
            self._feed(StepBoundary())
        if self._judging and self._judged_steps == PATIENCE_STEPS:
            self._tell_all({"do": "probe"})
        self._flush()

    def after_step(self, words: Sequence[Sequence[Word]]) -> None:
        """words: by rank, what came with the end of the step."""
        self._judged_steps += 1
        for of_rank in words:
            self.hear(of_rank)
        verdicts = [word["same"] for of_rank in words for word in of_rank if word["word"] == "canary"]
        if self._judging and len(verdicts) == len(self._orders) - len(self._status.lost):
            self._judging = False
            self._feed(CanaryDone(same=all(verdicts)))

    def hear(self, words: Sequence[Word]) -> None:
        """What a rank said of copies."""
        for word in words:
            self._hear(word)

    def lose(self, rank: int) -> None:
        """Routes past a rank from the next step on; a rebalance that is under way is dropped, and there are
        no more. Raises WorkerLost if nobody else has an expert of its."""
        if self._judging:
            self._judging = False
            self._tell_all({"do": "untry"})
        self._status = replace(self._status, lost=self._status.lost | {rank})
        self._feed(RankLost(rank=rank))
        for number, trip in list(self._trips.items()):
            if trip.at == rank and trip.lane is not None:
                self._end(number, trip)  # it says nothing any more
        if self._rebalancer.coverage.uncovered:
            raise WorkerLost("a rank of this replica is gone, and with it experts; it starts again")

    # -- effects -----------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        for effect in self._rebalancer.feed(event, self._clock()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartCopy(copy=copy):
                self._waiting.append(copy)
                self._start_copies()
            case DropCopies(copies=copies):
                self._drop(copies)
            case RunCanary(table=table, layers=layers, copies=copies):
                self._judging, self._judged_steps = True, 0
                new = [(copy.layer, copy.expert, copy.slot) for copy in copies]
                trial = Coverage(table=table, lost=self._status.lost)
                self._tell_all({"do": "try", "tables": _tables(trial, layers), "copies": new})
            case Install(coverage=coverage, copies=copies):
                self._install(coverage, copies)
            case Told():
                self._told(effect)
            case WantPlan():  # it goes on as it is: a whole incarnation is what should come next
                log.warning("experts of lost ranks have fewer copies now")

    def _install(self, coverage: Coverage, copies: Sequence[Copy]) -> None:
        table = coverage.table
        every = bool(coverage.lost) and not copies
        layers = [n for n, layer in enumerate(table.layers) if every or layer is not self._table.layers[n]]
        self._version += 1
        self._table = table
        self._tell_all({"do": "install", "tables": _tables(coverage, layers), "version": self._version})
        done = set(copies)
        self._trips = {number: trip for number, trip in self._trips.items() if trip.copy not in done}
        self._status = replace(self._status, table=table)

    def _told(self, told: Told) -> None:
        if self._judging:
            self._judging = False
            self._tell_all({"do": "untry"})
        words = f"{told.outcome}: {told.problem}" if told.problem else told.outcome
        log.info("rebalance of experts %s, %d copies installed", words, told.copies)
        outcomes = Counter(self._status.outcomes) + Counter([told.outcome])
        self._status = replace(self._status, outcomes=outcomes, last=words)

    # -- copies ------------------------------------------------------------------------------------------

    def _start_copies(self) -> None:
        while self._waiting and self._lanes:
            copy = self._waiting.popleft()
            if copy.source is None:
                self._feed(CopyFailed(copy=copy, problem="no rank holds the expert"))
                continue
            if not self._ferry_is_open:
                self._ferry_is_open = True
                self._tell_all({"do": "open", "lane_bytes": self._block_bytes})
            self._last_trip += 1
            lane = self._lanes.pop()
            self._trips[self._last_trip] = _Trip(copy=copy, lane=lane, at=copy.source)
            self._tell(
                copy.source,
                {
                    "do": "give",
                    "copy": self._last_trip,
                    "layer": copy.layer,
                    "expert": copy.expert,
                    "lane": lane,
                },
            )

    def _hear(self, word: Word) -> None:
        if word["word"] == "canary":
            return
        number = word["copy"]
        if word["word"] == "given":
            self._given(number, self._trips[number], word["sum"])
        else:
            self._taken(number, self._trips[number], word["same"])

    def _given(self, number: int, trip: _Trip, checksum: int | None) -> None:
        if trip.dropped:
            self._end(number, trip)
            return
        copy = trip.copy
        trip.at = copy.rank
        self._tell(
            copy.rank,
            {
                "do": "take", "copy": number, "layer": copy.layer, "expert": copy.expert, "lane": trip.lane,
                "sum": checksum,
            },
        )  # fmt: skip

    def _taken(self, number: int, trip: _Trip, same: bool) -> None:
        if trip.dropped:
            self._end(number, trip, taken=True)
            return
        self._free_lane(trip)
        if same:
            copied = self._status.copied_bytes + self._block_bytes
            self._status = replace(self._status, copied_bytes=copied)
            self._feed(CopyDone(copy=trip.copy))
        else:
            self._feed(CopyFailed(copy=trip.copy, problem="its weights came in damaged"))
        self._start_copies()

    def _drop(self, copies: Sequence[Copy]) -> None:
        gone = set(copies)
        self._waiting = deque(copy for copy in self._waiting if copy not in gone)
        for number, trip in list(self._trips.items()):
            if trip.copy not in gone or trip.dropped:
                continue
            trip.dropped = True
            if trip.lane is None:
                self._end(number, trip, taken=True)
            else:  # its rank says a last word
                assert trip.copy.source is not None
                for rank in {trip.copy.source, trip.copy.rank}:
                    self._tell(rank, {"do": "stop", "copy": number})

    def _end(self, number: int, trip: _Trip, *, taken: bool = False) -> None:
        """A dropped copy is over: nobody touches its lane and its block."""
        self._free_lane(trip)
        del self._trips[number]
        if taken:
            copy = trip.copy
            self._tell(copy.rank, {"do": "drop", "layer": copy.layer, "expert": copy.expert})
        self._start_copies()

    def _free_lane(self, trip: _Trip) -> None:
        if trip.lane is not None:
            self._lanes.append(trip.lane)
            trip.lane = None

    # -- orders ------------------------------------------------------------------------------------------

    def _tell(self, rank: int, order: Order) -> None:
        self._orders[rank].append(order)

    def _tell_all(self, order: Order) -> None:
        for rank in range(len(self._orders)):
            self._tell(rank, order)

    def _flush(self) -> None:
        """The other ranks first: some orders need all of them at once."""
        orders, self._orders = self._orders, [[] for _ in self._orders]
        self.ordered = frozenset(order["do"] for of_rank in orders for order in of_rank)
        opens = any(order["do"] == "open" for order in orders[0])
        fd = make_ferry(LANES * self._block_bytes) if opens else None
        try:
            problem: WorkerLost | None = None
            for rank, sock in enumerate(self._ranks, 1):
                if not orders[rank] or rank in self._status.lost:
                    continue
                try:
                    send(sock, Kind.ORDERS, encode(orders[rank]), fd=fd)
                except WorkerLost as error:  # the others get theirs: they may go on without it
                    problem = error
            if problem is not None:
                orders[0] = [order for order in orders[0] if order["do"] != "probe"]
            for order in orders[0]:
                self._tender.order(order, fd if order["do"] == "open" else None)
            if problem is not None:
                raise problem
        finally:
            if fd is not None:
                os.close(fd)


def _tables(coverage: Coverage, layers: Sequence[int]) -> dict[str, list[list[tuple[int, float]]]]:
    """By layer, what ranks need of a table."""
    experts = range(coverage.table.num_experts)
    return {str(n): [[(h.slot, h.share) for h in coverage.homes(n, e)] for e in experts] for n in layers}
