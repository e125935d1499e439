"""What must hold at every step: S1-S6, L1-L3 and the counters with a bound (protocol.md §10).

S1 is checked where rows are computed (`compute`) and where tokens reach the client (here). Everything else
is here. A rule that is broken raises `Breach`, and the run stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtransfer import effects as fx
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import HolderKind
from pdserve.messages import Abort, Ended, Refused, Reserved
from pdserve.sched.plan import Preempted, SeqEvent, Started
from pdserve.types import FinishReason, Key
from router import events as ev
from tests.simulation.bias import LEASE_S
from tests.simulation.model import END_TOKEN, reference
from tests.simulation.pagewatch import PageWatch
from tests.simulation.router_calls import ROUTER
from tests.simulation.world import Breach

if TYPE_CHECKING:
    from tests.simulation.dataplane import Read
    from tests.simulation.fleet import Fleet
    from tests.simulation.process import Process
    from tests.simulation.router import Request

GENEROUS_S = 60.0
"""A deadline that no fault excuses."""
QUIET_S = 2 * LEASE_S
_LEAKS = re.compile(r"/|\\|0x|<|>| at \d|\d+\.\d+\.\d+\.\d+|tenant-|object")
_BIG = float("inf")


class Judge:
    """Watches one run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._world = fleet, fleet.world
        self.current: Process | None = None
        self._events: list[tuple[str, Key]] = []
        self._disturbed: dict[str, float] = {}
        self._fenced: dict[tuple[int, str], Key] = {}
        self._owners: dict[Key, int] = {}
        self._over: set[tuple[int, Key]] = set()
        self._retracted: set[tuple[int, str]] = set()
        self._oldest: dict[int, tuple[object, float]] = {}
        self._pools: dict[int, PageWatch] = {}
        self._truths: dict[str, tuple[int, ...]] = {}

    # -- what explains trouble ------------------------------------------------------------------------------

    def disturbed(self, name: str, further: float = 0.0) -> None:
        """A fault strikes a process, now and for `further` seconds."""
        self._disturbed[name] = max(self._disturbed.get(name, -_BIG), self._world.now + further)

    def last_trouble(self, *names: str) -> float:
        """When something last struck one of these processes or the links among them and the router."""
        network = self._fleet.network
        times = [self._disturbed.get(name, -_BIG) for name in names]
        times += [p.born_at or -_BIG for p in map(self._fleet.processes.__getitem__, names)]
        ends = (*names, ROUTER)
        times += [network.last_disturbed(a, b) for i, a in enumerate(ends) for b in ends[i + 1 :]]
        now = self._world.now
        stopped = any(not p.alive or p.stopped for p in map(self._fleet.processes.__getitem__, names))
        return now if stopped else max(times)

    # -- engines (S5) and pages (S3) ------------------------------------------------------------------------

    @contextmanager
    def engine(self, process: Process | None) -> Iterator[None]:
        """Production code runs: nothing it is given may end it (S5)."""
        before, self.current = self.current, process
        try:
            yield
        except Breach:
            raise
        except Exception as error:
            who = process.name if process else ROUTER
            raise self._world.breach("S5", f"{who}: {type(error).__name__}: {error}") from error
        finally:
            self.current = before

    def after_input(self, process: Process) -> None:
        if problem := self._pools[process.incarnation].problem():
            raise self._world.breach("S3", f"{process.name}: {problem}")

    # -- retraction (D10, L3) -------------------------------------------------------------------------------

    def watch(self, process: Process) -> None:
        """Sees what pages it has, and the scheduler's events on their way to the roles."""
        self._pools[process.incarnation] = PageWatch(process.pages)
        for role in (process.prefill, process.decode):
            role.seq_event = self._watched(process, role.seq_event)  # type: ignore[method-assign]

    def _watched(self, process: Process, original: Any) -> Any:
        def seq_event(event: SeqEvent, now: float) -> list[fx.Effect]:
            mark = (process.incarnation, event.seq_id)
            if isinstance(event, Preempted):
                self._on_preempted(process, event)
                self._retracted.add(mark)
            elif isinstance(event, Started) and mark in self._retracted:
                self._retracted.discard(mark)
                if event.seq_id.startswith("D:"):
                    self._world.arrows["D10 RETRACTED→RUNNING"] += 1
            return original(event, now)

        return seq_event

    def _on_preempted(self, process: Process, event: Preempted) -> None:
        if event.seq_id.startswith("D:"):
            self._world.arrows["D10 RUNNING→RETRACTED"] += 1
        roster = process.scheduler._roster
        victim = roster.get(event.seq_id)
        holders = [*roster.running.values(), *roster._waiting_holders.values()]
        if victim is not None and not any(seq.age < victim.age for seq in holders):
            raise self._world.breach("L3", f"{process.name}: the oldest, {event.seq_id}, was retracted")

    # -- fencing (S4) ---------------------------------------------------------------------------------------

    def told(self, process: Process, key: Key) -> None:
        """D hears a cancel of this key."""
        mark = (process.incarnation, key.request_id)
        if mark not in self._fenced or self._fenced[mark] < key:
            self._fenced[mark] = key

    def committed(self, key: Key) -> None:
        """A session of the current process commits; it counts once the process's input is carried out."""
        self._events.append(("commit", key))

    def lease_over(self, key: Key, *, at_prefill: bool) -> None:
        """A session of the current process says that the other side was silent for a lease."""
        self._events.append(("prefill lease" if at_prefill else "decode lease", key))

    def settled(self, process: Process) -> None:
        """An input is through; after a gap of its own nothing of it gets out of the process."""
        events, self._events = self._events, []
        if process.core.retired:
            return
        for what, key in events:
            if what == "commit":
                self._check_commit(process, key)
            else:
                self._check_expiry(process, key, at_prefill=what == "prefill lease")

    def _check_commit(self, process: Process, key: Key) -> None:
        """It may not have been told to stop before, and nobody else may own the key."""
        fence = self._fenced.get((process.incarnation, key.request_id))
        if fence is not None and key <= fence:
            detail = f"{process.name} commits {key}, which was cancelled there"
            raise self._world.breach("zombie commits", detail)
        if self._owners.setdefault(key, process.incarnation) != process.incarnation:
            raise self._world.breach("S4", f"{key} was committed by two incarnations")

    def said(self, process: Process, effect: fx.AnswerPrefill | fx.AnswerDecode) -> None:
        """A worker's words to the router."""
        message = effect.message
        if isinstance(message, Refused):
            self._check_text(message.detail)
            self._world.faults["full_pool"] += message.reason == "full"
            side = "P1" if isinstance(effect, fx.AnswerPrefill) else "D1"
            self._world.arrows[f"{side} refused"] += 1
        elif isinstance(message, Ended):
            self._check_text(message.error_message)
            self._over.add((process.incarnation, effect.key))
        elif isinstance(message, Reserved):
            self._reserved(process, effect.key)

    def _reserved(self, process: Process, key: Key) -> None:
        """D takes a try: one that is meant for this very process (S4); what came before it is fenced."""
        if self._fleet.attempt(f"?:{key}").decode_incarnation != process.incarnation:
            raise self._world.breach(
                "S4", f"{process.name} takes {key}, which was meant for another incarnation"
            )
        fence = self._fenced.get((process.incarnation, key.request_id))
        if (fence is not None and key <= fence) or (process.incarnation, key) in self._over:
            raise self._world.breach("zombie commits", f"{process.name} takes {key}, which is over there")
        if key.epoch:
            self.told(process, replace(key, epoch=key.epoch - 1))

    def _check_text(self, text: str) -> None:
        if _LEAKS.search(text):
            raise self._world.breach("S6", f"an error text says too much: {text!r}")

    # -- leases and reads -----------------------------------------------------------------------------------

    def _check_expiry(self, process: Process, key: Key, *, at_prefill: bool) -> None:
        """Was the other side really silent?"""
        attempt = self._fleet.attempt(f"?:{key}")
        name = attempt.decode if at_prefill else attempt.prefill
        other = self._fleet.processes[name]
        role: Any = other.decode if at_prefill else other.prefill
        incarnations = (attempt.decode_incarnation, attempt.prefill_incarnation)
        entry = role._entries.get(key) if other.incarnation in incarnations else None
        alive = entry is not None and (entry.session.pulling if at_prefill else entry.session.live)
        self._world.counters["lease_over"] += 1
        if process.inbox:
            detail = f"{process.name} gives {key} up before it has read its messages"
            raise self._world.breach("false expiries", detail)
        if alive and self.last_trouble(process.name, name) < self._world.now - QUIET_S:
            detail = f"{process.name} gives {key} up though {name} was there all the time"
            raise self._world.breach("false expiries", detail)

    def read_ended(self, process: Process, read: Read, status: ReadStatus) -> None:
        self._world.counters[f"reads_{status}"] += 1
        flipped = read.source is not None and self._fleet.faults.flips_in(read.source)
        if status is ReadStatus.MISMATCH and not (read.struck or flipped or self._world.bias.mask):
            detail = f"{process.name}: page {read.effect.index} of {read.effect.key} failed its digest"
            raise self._world.breach("false alarms", f"{detail} though nothing struck it")

    def alarmed(self, process: Process, message: object) -> None:
        """Decode complains about what prefill said. Did anything strike it?"""
        said = message.detail if isinstance(message, Abort) else ""
        if ("digest over all" in said or "two digests" in said) and not self._world.bias.mask:
            raise self._world.breach("false alarms", f"{process.name}: {said}")

    def counted(self, process: Process, name: str) -> None:
        """A worker counts something that has to have a reason."""
        if name == "over_credit":
            raise self._world.breach("over-credit announces", f"{process.name} was told more than it granted")
        if name == "quarantined":
            oldest = min((read.started_at for read in process.reads.values()), default=_BIG)
            if self._world.now - oldest < 0.8 * LEASE_S:
                raise self._world.breach("quarantined pages", f"{process.name}: no read lasts that long")
        self._world.arrows["D6 by wrong key"] += name == "wrong_content_key"
        self._world.arrows["D14 quarantined"] += name == "quarantined"
        if name == "wrong_content_key" and not self._world.faults["forge"]:
            raise self._world.breach("S1", f"{process.name}: a page of another text was announced")

    def retired(self, process: Process) -> None:
        held_up = self._world.now - self.last_trouble(process.name) < 2 * QUIET_S
        if not held_up and not process.core.over_quarantine:
            raise self._world.breach("false retirements", f"{process.name} gave itself up without a reason")

    # -- the client's edge (S1, S2, L1) ---------------------------------------------------------------------

    def emitted(self, request: Request, effect: ev.Emit) -> None:
        name, index, token = request.wish.name, effect.index, effect.token_id
        if request.end is not None or index != len(request.got):
            raise self._world.breach("S2", f"{name}: token {index} comes after {len(request.got)} tokens")
        assert request.state.key is not None
        if (request.row, token) not in self._fleet.samples.get((request.state.key, index), ()):
            raise self._world.breach("S2", f"{name}: token {index} does not follow from what was delivered")
        truth = self._truth(request)
        if truth is not None and (index >= len(truth) or truth[index] != token):
            raise self._world.breach("S1", f"{name}: token {index} is {token}, which is wrong")
        request.got.append(token)
        request.row = self._world.texts.row(request.row, token)

    def _truth(self, request: Request) -> tuple[int, ...] | None:
        wish = request.wish
        if wish.sampled:
            return None
        if wish.name not in self._truths:
            self._truths[wish.name] = reference(self._world.texts, wish.tenant, wish.prompt, wish.max_tokens)
        return self._truths[wish.name]

    def ended(self, request: Request, end: ev.EndStream) -> None:
        """The one terminal status."""
        name, world = request.wish.name, self._world
        world.note("client", f"{name} ends:", end.finish or f"{end.label} ({end.message})")
        if request.end is not None:
            raise world.breach("S2", f"{name}: two terminal statuses")
        request.end, request.ended_at = end, world.now
        self._check_text(end.message)
        if world.now > request.deadline_at + LEASE_S:
            raise world.breach("L1", f"{name} ended after its deadline and a lease")
        if end.finish is None:
            self._check_failure(request, end)
        elif not self._is_complete(request, end.finish):
            raise world.breach("S2", f"{name}: {end.finish} after {len(request.got)} tokens")

    def _is_complete(self, request: Request, finish: FinishReason) -> bool:
        wish, got = request.wish, request.got
        if finish is FinishReason.STOP:
            return bool(got) and (got[-1] == END_TOKEN or len(got) == wish.stop_after)
        return len(got) == wish.max_tokens and got[-1] != END_TOKEN

    def _check_failure(self, request: Request, end: ev.EndStream) -> None:
        """A request may only fail for a reason."""
        wish, tries = request.wish, request.state.num_tries
        self._world.counters[f"failed_{end.label}"] += 1
        if end.label == "deadline_expired" and wish.deadline_s >= GENEROUS_S:
            raise self._world.breach("deadline failures", f"{wish.name} had {wish.deadline_s:.0f} s")
        poisoned = self._fleet.faults.is_poisoned(wish.name)
        fine = {
            "cancelled": request.gone, "deadline_expired": True, "overloaded": not wish.probe,
            "internal": poisoned or tries >= 3, "worker_lost": tries >= 3, "unavailable": tries >= 3,
        }.get(end.label, False)  # fmt: skip
        if not fine or (wish.probe and not request.gone):
            raise self._world.breach("unexplained failures", f"{wish.name}: {end.label}: {end.message}")

    # -- from time to time (L1, L2, L3) ---------------------------------------------------------------------

    def look(self, process: Process) -> None:
        """Every heartbeat of a process."""
        if problem := process.core.check_integrity():
            raise self._world.breach("S3", f"{process.name}: {problem}")
        self._look_at_holders(process)
        self._look_at_oldest(process)
        for request in self._fleet.router.requests.values():
            if request.end is None and self._world.now > request.deadline_at + LEASE_S:
                raise self._world.breach("L1", f"{request.wish.name} has not ended")

    def _look_at_holders(self, process: Process) -> None:
        """L2: a lease after the end of a request no page is held for it."""
        now, requests = self._world.now, self._fleet.router.requests
        for holder in process.pages.allocator._pages_of:
            if holder.kind is not HolderKind.REQUEST and holder.kind is not HolderKind.TRANSFER:
                continue
            key = holder.id.rpartition(":")[2]
            request = requests.get(key.partition("/")[0])
            if request is None or now < request.ended_at + 1.3 * LEASE_S + 1.0:
                continue
            attempt = self._fleet.attempt(f"?:{key}")
            if now > self.last_trouble(*{attempt.decode, attempt.prefill}) + 1.3 * LEASE_S + 1.0:
                detail = (
                    f"{process.name}: {holder.kind} {holder.id} holds pages {now - request.ended_at:.1f} s"
                )
                raise self._world.breach("L2", f"{detail} after its end")

    def _look_at_oldest(self, process: Process) -> None:
        """L3: the oldest running sequence goes on."""
        ages = process.scheduler._roster.by_age()
        if not ages:
            self._oldest.pop(process.incarnation, None)
            return
        state = (ages[0].seq_id, ages[0].num_computed, len(ages[0].tokens))
        known, since = self._oldest.get(process.incarnation, (None, 0.0))
        if known != state:
            self._oldest[process.incarnation] = (state, self._world.now)
        elif self._waits_for_transfers(process):
            self._world.counters["oldest_waits_for_transfers"] += 1
            self._oldest[process.incarnation] = (state, self._world.now)
        elif self._world.now > max(since, self.last_trouble(process.name)) + QUIET_S:
            raise self._world.breach("L3", f"{process.name}: the oldest, {ages[0].seq_id}, does not go on")

    def _waits_for_transfers(self, process: Process) -> bool:
        """Whether all pages that could be had are promised to transfers under way, which nobody takes back:
        the oldest waits for them, longer than a lease when they are slow (docs/failure-modes.md)."""
        pulling = any(entry.session.state.name == "PULL" for entry in process.decode._entries.values())
        return pulling and not process.pages.available

    # -- the end --------------------------------------------------------------------------------------------

    def problem_at_end(self) -> str:
        """What is not as it must be once everything is over; "" if nothing."""
        fleet = self._fleet
        for process in fleet.processes.values():
            left = process.pages.num_pages - process.pages.available - process.pages.num_quarantined
            roles = process.core._roles
            checks = {
                "no process": not process.alive, "a session lives": process.core.num_live > 0,
                "pages are held": left > 0, "a call is open": process.calls.num_open > 0,
                "a read goes on": bool(process.reads), "a step runs": process.core.busy,
                "a timer is left": any(role.next_timer() < _BIG for role in roles),
            }  # fmt: skip
            if wrong := [what for what, is_so in checks.items() if is_so]:
                return f"{process.name}: {wrong[0]}"
        router = fleet.router
        if router.calls.open or len(router.queue) or not router.inflight.is_empty:
            return "router: calls, queue or accounting are not empty"
        return ""
