"""Queue and policy at work: who is next, where it goes, and the accounting of what is where.

What lives here: the admission queue, loads in flight, decode workers that said they are full. What does not:
what happens to a request once it is assigned (`request`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pdserve import failpoints
from pdserve.clock import Clock
from pdserve.obs.logging import fields
from pdserve.types import Key, PeerRef
from router import events as ev
from router.admission import AdmissionQueue, QueueLimits, Shed, Waiting
from router.config import RouterConfig
from router.inflight import InFlight
from router.policy import Ask, NoChoice, PolicyConfig, choose, choose_prefill
from router.room import Room
from router.roster import Roster

log = logging.getLogger(__name__)

SHED_MESSAGE = "The request waited too long for a free worker: come back later."


class Queued(Protocol):
    """What the dispatcher needs of a request that waits."""

    @property
    def waiting(self) -> Waiting: ...

    @property
    def avoid(self) -> frozenset[int]: ...

    @property
    def pinned(self) -> int | None:
        """The decode worker to prefer, which has the prompt's pages."""

    def apply(self, event: ev.Event) -> None:
        """Takes an Assigned or Shed at once."""


class Dispatcher:
    """Owned by the event loop; every change ends in at most one `pump` per loop iteration."""

    def __init__(self, config: RouterConfig, roster: Roster, clock: Clock) -> None:
        self._roster, self._clock = roster, clock
        self._policy = PolicyConfig(
            mixing=config.mixing,
            local_prefill_threshold=config.local_prefill_threshold,
            prefill_backlog_tokens=config.prefill_backlog_tokens,
        )
        self._queue = AdmissionQueue(
            QueueLimits(
                max_requests=config.max_queue,
                max_tokens=config.max_queue_tokens,
                max_wait_s=config.max_queue_wait_s,
                tenant_share=config.max_tenant_share,
            )
        )
        self._waiting: dict[str, Queued] = {}
        self._room = Room()
        self._pump_due = False
        self.inflight = InFlight()
        self.why = ""
        """Why the queue's head did not get a worker when last tried; "" if it did."""
        self.on_shed: Callable[[str], None] = lambda reason: None
        """Called with why a request may not wait, or not any longer."""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._queue.tokens

    def submit(self, request: Queued) -> None:
        """Queues a new request. Raises Overloaded if it can not wait here; a part of an admitted one can."""
        entry = request.waiting
        if request.pinned is not None:
            self._queue.requeue(entry)
            self._waiting[entry.request_id] = request
            self.poke()
            return
        try:
            shed = self._queue.offer(entry, self._clock.now())
        except Shed as error:
            self.on_shed(error.reason)
            raise
        self._waiting[entry.request_id] = request
        self._shed(shed, "The queue is full of more urgent requests: come back later.", "displaced")
        self.poke()

    def requeue(self, request: Queued, effect: ev.Requeue) -> None:
        """Queues a request for another try."""
        entry = request.waiting
        self._queue.requeue(entry)
        self._waiting[entry.request_id] = request
        if effect.blocked is not None:
            self._room.refused(effect.blocked, self._clock.now(), effect.block_s)
            asyncio.get_running_loop().call_later(effect.block_s, self.poke)
        self.poke()

    def rebind(self, effect: ev.Rebind) -> ev.Rebound:
        """Another prefill worker for a request that a decode worker holds pages for."""
        found = choose_prefill(
            self._roster.candidates(), self.inflight, effect.decode, effect.avoid, self._policy
        )
        return ev.Rebound(key=effect.key, prefill=found)

    def leave(self, request_id: str) -> None:
        """The request ended while it waited, or never waited."""
        self._queue.remove(request_id)
        self._waiting.pop(request_id, None)

    def count(self, key: Key, *, decode: PeerRef, prefill: PeerRef | None, tokens: int, rows: int) -> None:
        """A try goes out. tokens: prompt tokens to compute; rows: KV rows it may grow to."""
        self._room.tried(decode.incarnation, key)
        self.inflight.add(
            key,
            decode=decode.incarnation,
            prefill=decode.incarnation if prefill is None else prefill.incarnation,
            prefill_tokens=tokens,
            decode_tokens=rows,
        )

    def reserved(self, key: Key, hit_tokens: int) -> None:
        """The try's decode worker has taken it, and has pages of so many prompt tokens."""
        self.inflight.found(key, hit_tokens)
        worker = self.inflight.decode_of(key)
        if worker is not None and self._room.answered(worker, key):
            self.poke()

    def release_prefill(self, key: Key) -> None:
        """The prompt is computed or given up."""
        if self.inflight.release_prefill(key) is not None:
            self.poke()

    def release_decode(self, key: Key) -> None:
        """The try is over; its decode worker has room again."""
        worker = self.inflight.release_decode(key)
        if worker is not None:
            self._room.answered(worker, key)
            self._room.freed(worker)
            self.poke()

    def forget(self, incarnation: int) -> None:
        """The worker is gone."""
        self.inflight.forget(incarnation)
        self._room.forget(incarnation)

    def poke(self) -> None:
        """Something changed: look at the queue soon."""
        if not self._pump_due and len(self._queue):
            self._pump_due = True
            loop, wait_s = asyncio.get_running_loop(), failpoints.stall_s("queue")
            if wait_s:
                loop.call_later(wait_s, self._pump)
            else:
                loop.call_soon(self._pump)

    def tick(self) -> None:
        """Time passed: sheds what waited too long."""
        self._shed(self._queue.expired(self._clock.now()), SHED_MESSAGE, "waited_too_long")
        self.poke()

    def _shed(self, entries: tuple[Waiting, ...], message: str, reason: str) -> None:
        for entry in entries:
            self.on_shed(reason)
            request = self._waiting.pop(entry.request_id)
            request.apply(ev.Shed(message=message, retry_after_s=self._queue.retry_after_s()))

    def _pump(self) -> None:
        self._pump_due = False
        self.why = ""
        now = self._clock.now()
        candidates = self._roster.candidates()
        while (entry := self._queue.first()) is not None:
            request = self._waiting[entry.request_id]
            ask = Ask(
                prompt_tokens=entry.tokens,
                avoid=request.avoid,
                blocked=self._room.closed(now),
                pinned=request.pinned,
            )
            choice = choose(candidates, self.inflight, ask, self._policy)
            if isinstance(choice, NoChoice):
                log.debug("a request waits: %s", choice.reason, extra=fields(request_id=entry.request_id))
                self.why = choice.reason
                return
            self._queue.take(entry.request_id, now)
            del self._waiting[entry.request_id]
            log.debug("a request goes %s", choice.reason, extra=fields(request_id=entry.request_id))
            request.apply(ev.Assigned(decode=choice.decode, prefill=choice.prefill))
