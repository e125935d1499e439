"""The one queue of a router: bounded, by priority then arrival, aware of deadlines. Pure.

Only routers queue (protocol.md §4). What is over the bounds, or would wait past its deadline, is shed at once
with a hint when to come back. What does not live here: choosing workers, and the requests themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.errors import Overloaded

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """max_requests, max_tokens: bounds of the queue. max_wait_s: a request never tried waits no longer.
    tenant_share: part of both bounds that one tenant may take, 0 to 1; one request may always wait."""

    max_requests: int = 512
    max_tokens: int = 4_000_000
    max_wait_s: float = 60.0
    tenant_share: float = 1.0


class Shed(Overloaded):
    """A request that may not wait. reason: of `pdserve.obs.catalogue.router.SHED_REASONS`."""

    def __init__(self, reason: str, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One queued request. Times on the router's monotonic clock.

    arrival: sequence number of the first admission; kept over tries, so a retry goes first. tried: a try of
    it has failed before, so it is never shed; a mere refusal (full, draining) is no such try.
    """

    request_id: str
    priority: int
    arrival: int
    tokens: int
    queued_at: float
    deadline_at: float
    tried: bool = False
    tenant: str = ""

    @property
    def rank(self) -> tuple[int, int, str]:
        """Order in the queue: lower first. Choices of one request arrived together."""
        return (self.priority, self.arrival, self.request_id)


@dataclass(slots=True)
class AdmissionQueue:
    """The queue. Called by the event loop only."""

    limits: QueueLimits
    _order: list[Waiting] = field(default_factory=list)
    _by_id: dict[str, Waiting] = field(default_factory=dict)
    _tokens: int = 0
    _by_tenant: dict[str, tuple[int, int]] = field(default_factory=dict)  # requests and tokens
    _interval_s: float | None = None
    _last_leave: float | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    def __iter__(self) -> Iterator[Waiting]:
        """All in order."""
        return iter(tuple(self._order))

    def offer(self, entry: Waiting, now: float) -> tuple[Waiting, ...]:
        """Takes a new request; returns those of lower priority that are shed for it (the caller ends them).

        Raises Shed if the queue is full of equal or better ones, its tenant has its share of it, or
        the deadline would pass in it.
        """
        self._check_share(entry)
        wait = self._expected_wait(entry)
        if wait is not None and now + wait > entry.deadline_at:
            message = (
                "The request would still be queued at its deadline: come back later, or allow more time."
            )
            raise Shed("deadline", message, retry_after_s=self.retry_after_s())
        shed = self._make_room(entry)
        self._insert(entry)
        return shed

    def requeue(self, entry: Waiting) -> None:
        """Takes a request back for another try, whatever the bounds: it was admitted once."""
        self._insert(entry)

    def first(self) -> Waiting | None:
        """The next request, or None; it stays. Nobody overtakes it, so that large ones get their turn."""
        return self._order[0] if self._order else None

    def take(self, request_id: str, now: float) -> Waiting | None:
        """Removes a request that goes to workers, and learns how fast the queue moves."""
        entry = self.remove(request_id)
        if entry is not None:
            self._learn(now)
        return entry

    def remove(self, request_id: str) -> Waiting | None:
        """Removes a request that ended while it waited; None if it does not wait."""
        entry = self._by_id.pop(request_id, None)
        if entry is not None:
            self._order.pop(bisect.bisect_left(self._order, entry.rank, key=_rank))
            self._count(entry, -1)
        return entry

    def expired(self, now: float) -> tuple[Waiting, ...]:
        """Removes and returns what waited too long without ever being tried."""
        limit = now - self.limits.max_wait_s
        over = tuple(entry for entry in self._order if not entry.tried and entry.queued_at <= limit)
        for entry in over:
            self.remove(entry.request_id)
        return over

    def retry_after_s(self) -> float:
        """Seconds after which half of the queue should have moved."""
        interval = self._interval_s if self._interval_s is not None else 0.5
        return min(max(interval * (len(self._order) + 1) / 2, MIN_RETRY_S), MAX_RETRY_S)

    def _expected_wait(self, entry: Waiting) -> float | None:
        """Seconds until this entry would leave; None while we have not seen the queue move."""
        if self._interval_s is None or not self._order:
            return None
        return bisect.bisect_left(self._order, entry.rank, key=_rank) * self._interval_s

    def _make_room(self, entry: Waiting) -> tuple[Waiting, ...]:
        """Removes what has to go for `entry`: of lower priority, never tried. Raises Shed."""
        requests, tokens = len(self._order), self._tokens
        victims: list[Waiting] = []
        candidates = (w for w in reversed(self._order) if not w.tried and w.priority > entry.priority)
        while requests + 1 > self.limits.max_requests or tokens + entry.tokens > self.limits.max_tokens:
            victim = next(candidates, None)
            if victim is None:
                message = "The queue is full: come back later."
                raise Shed("queue_full", message, retry_after_s=self.retry_after_s())
            victims.append(victim)
            requests, tokens = requests - 1, tokens - victim.tokens
        for victim in victims:
            self.remove(victim.request_id)
        return tuple(victims)

    def _insert(self, entry: Waiting) -> None:
        assert entry.request_id not in self._by_id
        bisect.insort(self._order, entry, key=_rank)
        self._by_id[entry.request_id] = entry
        self._count(entry, 1)

    def _count(self, entry: Waiting, sign: int) -> None:
        self._tokens += sign * entry.tokens
        requests, tokens = self._by_tenant.pop(entry.tenant, (0, 0))
        if requests + sign:
            self._by_tenant[entry.tenant] = (requests + sign, tokens + sign * entry.tokens)

    def _check_share(self, entry: Waiting) -> None:
        requests, tokens = self._by_tenant.get(entry.tenant, (0, 0))
        share = self.limits.tenant_share
        full = requests + 1 > share * self.limits.max_requests
        if share < 1 and requests and (full or tokens + entry.tokens > share * self.limits.max_tokens):
            message = "As many requests of this tenant wait as may: come back later."
            raise Shed("tenant_share", message, retry_after_s=self.retry_after_s())

    def _learn(self, now: float) -> None:
        """Smoothed time between departures; only while others wait, as an idle queue says nothing."""
        if self._last_leave is not None and self._order:
            seen = now - self._last_leave
            old = self._interval_s if self._interval_s is not None else seen
            self._interval_s = old + _SMOOTHING * (seen - old)
        self._last_leave = now if self._order else None


def _rank(entry: Waiting) -> tuple[int, int, str]:
    return entry.rank
