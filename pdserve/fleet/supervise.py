"""Which workers to start, restart and retire, and when. Pure: events and `now` in, commands out.

A slot is a place for one worker. It keeps its worker id over restarts; each start of a process is a new
incarnation, which the worker draws itself. Ray, timers and processes are the controller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.types import Role

HEALTHY_AFTER_S = 30.0
"""A worker that served this long starts its back-off from the beginning when it dies."""


class SlotState(StrEnum):
    """Where a slot's worker is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    RETIRING = "retiring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a worker in this slot."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Drain this slot's worker and end it."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Give this slot's place back; there is no worker in it. The slot is there until `ended` is told."""

    worker_id: str


Command = Start | Retire | Forget


@dataclass(slots=True, kw_only=True)
class Slot:
    """One worker's place. Times are `now` of the events; record and note are the worker's own words."""

    worker_id: str
    role: Role
    state: SlotState = SlotState.WAITING
    since: float = 0.0
    start_at: float = 0.0
    failures: int = 0
    restarts: int = 0
    note: str = ""
    record: Mapping[str, Any] | None = None
    error: Mapping[str, str] | None = None


class Supervisor:
    """Holds the slots. Every method that may change what is to be done is followed by `due`."""

    def __init__(
        self, wanted: Mapping[Role, int], *, min_backoff_s: float, max_backoff_s: float, fleet: str = ""
    ) -> None:
        """fleet: its name, which workers are called after."""
        self._prefix = f"{fleet}-" if fleet else ""
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self.wanted = {role: wanted.get(role, 0) for role in Role}
        self.slots: dict[str, Slot] = {}
        self.restarts = dict.fromkeys(Role, 0)

    def scale(self, role: Role, count: int) -> None:
        """Wants `count` workers of a role from now on."""
        self.wanted[role] = count

    def adopt(self, worker_id: str, role: Role, now: float) -> None:
        """A worker was found running that this supervisor did not start."""
        self.slots[worker_id] = Slot(
            worker_id=worker_id, role=role, state=SlotState.STARTING, since=now, start_at=now
        )

    def due(self, now: float) -> list[Command]:
        """Commands to carry out now; each is given once."""
        commands: list[Command] = []
        for role in Role:
            live = [slot for slot in self._of(role) if slot.state is not SlotState.RETIRING]
            commands += self._retire(live[self.wanted[role] :], now)
            self._add(role, self.wanted[role] - len(live), now)
        for slot in list(self.slots.values()):
            if slot.state is SlotState.WAITING and slot.start_at <= now:
                self._enter(slot, SlotState.STARTING, now)
                commands.append(Start(worker_id=slot.worker_id, role=slot.role))
        return commands

    def next_due(self) -> float | None:
        """When a waiting slot is to be started, or None."""
        waiting = [slot.start_at for slot in self.slots.values() if slot.state is SlotState.WAITING]
        return min(waiting, default=None)

    def noted(self, worker_id: str, note: str) -> bool:
        """A starting worker said what it does. True if that is news."""
        slot = self.slots.get(worker_id)
        if slot is None or slot.state is not SlotState.STARTING or slot.note == note:
            return False
        slot.note = note
        return True

    def serving(self, worker_id: str, record: Mapping[str, Any], now: float) -> None:
        """A worker said that it serves."""
        slot = self.slots.get(worker_id)
        if slot is None or slot.state is not SlotState.STARTING:
            return
        slot.record, slot.error = record, None
        self._enter(slot, SlotState.SERVING, now)

    def ended(
        self, worker_id: str, error: Mapping[str, str] | None, now: float, *, retired: bool = False
    ) -> None:
        """A worker's process is gone, or could not be started. A retiring slot ends with it.

        retired: it ended its incarnation itself (exit status 75) and can serve again: no back-off.
        """
        slot = self.slots.get(worker_id)
        if slot is None:
            return
        if slot.state is SlotState.RETIRING:
            del self.slots[worker_id]
            return
        if retired:
            self._restarted(slot)
            slot.record, slot.error, slot.start_at = None, error, now
            self._enter(slot, SlotState.WAITING, now)
            return
        healthy = slot.state is SlotState.SERVING and now - slot.since >= HEALTHY_AFTER_S
        slot.failures = 1 if healthy else slot.failures + 1
        self._restarted(slot)
        slot.record, slot.error = None, error
        slot.start_at = now + self._backoff(slot.failures)
        self._enter(slot, SlotState.WAITING, now)

    def drain(self, worker_id: str, now: float) -> Retire | Forget | None:
        """Wants this worker gone, and one fewer of its role. None: no such worker, or already going."""
        slot = self.slots.get(worker_id)
        if slot is None or slot.state is SlotState.RETIRING:
            return None
        self.wanted[slot.role] = max(0, self.wanted[slot.role] - 1)
        return self.move(worker_id, now)

    def move(self, worker_id: str, now: float) -> Retire | Forget | None:
        """Wants this worker gone from where it is; `due` starts another one. None: as for drain."""
        slot = self.slots.get(worker_id)
        if slot is None or slot.state is SlotState.RETIRING:
            return None
        return self._retire([slot], now)[0]

    def enough_serving(self) -> bool:
        """As many workers of each role serve as are wanted, whatever is on its way in or out."""
        serving = [slot.role for slot in self.slots.values() if slot.state is SlotState.SERVING]
        return all(serving.count(role) >= count for role, count in self.wanted.items())

    def all_serving(self) -> bool:
        """Every wanted worker serves, and none is on its way in or out."""
        states = [slot.state for slot in self.slots.values()]
        return len(states) == sum(self.wanted.values()) and all(s is SlotState.SERVING for s in states)

    def _of(self, role: Role) -> list[Slot]:
        return sorted((s for s in self.slots.values() if s.role is role), key=lambda s: _index(s.worker_id))

    def _retire(self, slots: Iterable[Slot], now: float) -> list[Retire | Forget]:
        commands: list[Retire | Forget] = []
        for slot in slots:
            # One that waits for its next try holds the place of its last one.
            kind = Forget if slot.state is SlotState.WAITING else Retire
            self._enter(slot, SlotState.RETIRING, now)
            commands.append(kind(worker_id=slot.worker_id))
        return commands

    def _add(self, role: Role, count: int, now: float) -> None:
        used = {_index(slot.worker_id) for slot in self._of(role)}
        free = (index for index in range(len(used) + max(count, 0)) if index not in used)
        for _ in range(count):
            worker_id = f"{self._prefix}{role}-{next(free)}"
            self.slots[worker_id] = Slot(worker_id=worker_id, role=role, since=now, start_at=now)

    def _enter(self, slot: Slot, state: SlotState, now: float) -> None:
        slot.state, slot.since, slot.note = state, now, ""

    def _restarted(self, slot: Slot) -> None:
        slot.restarts += 1
        self.restarts[slot.role] += 1

    def _backoff(self, failures: int) -> float:
        return min(self._max_backoff_s, self._min_backoff_s * 2.0 ** min(failures - 1, 30))


def _index(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
