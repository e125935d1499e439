"""Who the workers are: registration, heartbeats, incarnations, suspicion and loss. Pure.

A worker is *suspect* when its stream broke or its heartbeats stop: it gets no new work, and nothing is
released. It is *lost* when that lasts, or another incarnation takes its name: its requests go elsewhere. A
replaced incarnation never comes back (two processes with one name must not take turns); one that was only
silent may register again, as keys fence what it still does for old tries.
What does not live here: streams, channels, choosing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pdserve.types import ClockSample, WorkerLoad, WorkerRecord
from router.clocks import ClockFilter

MAX_FENCED = 4096
MAX_TICK_GAP_S = 2.0
"""A longer gap between ticks was our own pause: nobody could be heard, so it counts against nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """suspect_after_s, lost_after_s: seconds without a heartbeat."""

    suspect_after_s: float = 4.0
    lost_after_s: float = 10.0


@dataclass(slots=True, kw_only=True)
class Member:
    """A worker. clock_offset_s: its monotonic clock less ours, at least; times are on our clock.

    clock: what round trips say of its clock, for ledgers.
    """

    record: WorkerRecord
    load: WorkerLoad = field(default_factory=WorkerLoad)
    heard_at: float
    clock_offset_s: float
    stream_broken: bool = False
    clock: ClockFilter = field(default_factory=ClockFilter)

    @property
    def incarnation(self) -> int:
        return self.record.peer.incarnation

    def its_time(self, ours: float) -> float:
        """A moment of our monotonic clock on the worker's own."""
        return ours + self.clock_offset_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Answer to a registration. problem: why it was refused, or None. replaced: who is lost by it."""

    problem: str | None = None
    replaced: WorkerRecord | None = None


@dataclass(slots=True)
class Membership:
    """All members by worker id. Called by the event loop only."""

    config: MembershipConfig
    _members: dict[str, Member] = field(default_factory=dict)
    _fenced: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _last_tick: float | None = None

    def register(self, record: WorkerRecord, monotonic_s: float, now: float) -> Joined:
        """A worker presents itself. The same incarnation may come again (a new stream); another replaces."""
        peer = record.peer
        if peer.incarnation in self._fenced:
            return Joined(problem="Another process has taken this worker id; give each worker its own.")
        problem = self._model_problem(record)
        if problem is not None:
            return Joined(problem=problem)
        old = self._members.get(peer.worker_id)
        replaced = old.record if old is not None and old.incarnation != peer.incarnation else None
        if replaced is not None:
            self._fence(replaced)
        offset = monotonic_s - now
        if old is not None and replaced is None:
            offset = max(offset, old.clock_offset_s)
        load = old.load if old is not None and replaced is None else WorkerLoad(num_pages=record.pool_pages)
        clock = old.clock if old is not None and replaced is None else ClockFilter(now - monotonic_s)
        self._members[peer.worker_id] = Member(
            record=record, load=load, heard_at=now, clock_offset_s=offset, clock=clock
        )
        return Joined(replaced=replaced)

    def _model_problem(self, record: WorkerRecord) -> str | None:
        others = [m for m in self._members.values() if m.record.peer.worker_id != record.peer.worker_id]
        if not others:
            return None
        ours = others[0].record.capability
        if record.capability.model != ours.model:
            return "This router serves another model; give each model its own router."
        if record.capability.tokenizer != ours.tokenizer:
            return (
                "This router serves the model with another tokenizer; start all workers from the same files."
            )
        return None

    def heartbeat(
        self, worker_id: str, incarnation: int, load: WorkerLoad, monotonic_s: float, now: float,
        sample: ClockSample | None = None,
    ) -> bool:  # fmt: skip
        """False if this incarnation is no member (any more): its stream should end."""
        member = self.member(worker_id, incarnation)
        if member is None:
            return False
        member.load, member.heard_at, member.stream_broken = load, now, False
        member.clock_offset_s = max(member.clock_offset_s, monotonic_s - now)
        if sample is not None:
            member.clock.add(sample)
        return True

    def broken(self, worker_id: str, incarnation: int) -> bool:
        """A stream or a call to the worker broke: suspect until it is heard again. False if no member."""
        member = self.member(worker_id, incarnation)
        if member is not None:
            member.stream_broken = True
        return member is not None

    def leave(self, worker_id: str, incarnation: int) -> WorkerRecord | None:
        """The worker goes on purpose. Returns its record if it was a member."""
        member = self.member(worker_id, incarnation)
        if member is None:
            return None
        del self._members[worker_id]
        return member.record

    def tick(self, now: float) -> tuple[WorkerRecord, ...]:
        """Gives up on workers not heard for too long and returns them. Call it every second or faster."""
        gap = now - self._last_tick if self._last_tick is not None else 0.0
        self._last_tick = now
        if gap > MAX_TICK_GAP_S:
            for member in self._members.values():
                member.heard_at += gap
        lost = [m for m in self._members.values() if now - m.heard_at >= self.config.lost_after_s]
        for member in lost:
            del self._members[member.record.peer.worker_id]
        return tuple(member.record for member in lost)

    def member(self, worker_id: str, incarnation: int) -> Member | None:
        """The member with this id if it is this incarnation."""
        member = self._members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def members(self) -> tuple[Member, ...]:
        """All members, in order of their ids' first registration."""
        return tuple(self._members.values())

    def is_suspect(self, member: Member, now: float) -> bool:
        """Whether the worker may be gone: it gets no new work."""
        return member.stream_broken or now - member.heard_at >= self.config.suspect_after_s

    def is_usable(self, member: Member, now: float) -> bool:
        """Whether new work may go there."""
        return member.load.ready and not member.load.draining and not self.is_suspect(member, now)

    def _fence(self, record: WorkerRecord) -> None:
        self._fenced[record.peer.incarnation] = None
        while len(self._fenced) > MAX_FENCED:
            self._fenced.popitem(last=False)
