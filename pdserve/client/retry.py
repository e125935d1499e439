"""When a failed call is made again, and where: a policy, and the tries of one call under it.

What lives here: the decision, free of I/O. What does not: waiting, and which routers there are (`pool`).
A call is made again only where nothing can have been made of it: it was refused, or it only reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.client.pool import Endpoint, Pool
from pdserve.errors import ConfigError, Draining, Overloaded, PdserveError, Unavailable

FIRST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a call is made, and how long it may wait in between.

    attempts: rounds over the routers, 1 to 100; 1 tries each router once. max_wait_s: of one wait; a server
    that wants a longer one is not waited for. Waits are those the server names (RetryInfo), else they double
    from 0.1 s; up to a quarter is added by chance. A call's deadline holds for all its tries.
    Raises ConfigError.
    """

    attempts: int = 3
    max_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 100:
            raise ConfigError("retry: attempts must be from 1 to 100")
        if not 0 <= self.max_wait_s < float("inf"):
            raise ConfigError("retry: max_wait_s must be a number of seconds, 0 or more")


@dataclass(slots=True, kw_only=True)
class Tries:
    """The tries of one call: `take` a router for each, `failed` after each that failed.

    only: the one router that can answer. repeats: the call may be made again although a server may have
    seen it. clock: seconds. chance: 0 to 1.
    """

    pool: Pool
    retry: Retry
    deadline_at: float
    clock: Callable[[], float]
    chance: Callable[[], float]
    only: Endpoint | None = None
    repeats: bool = True
    router: Endpoint | None = None
    _tried: list[Endpoint] = field(default_factory=list)
    _rounds: int = 0

    def take(self) -> Endpoint:
        """The router for the next try; it counts as a call there until `Pool.done`."""
        self.router = self.pool.take(self._tried, self.only)
        self._tried.append(self.router)
        return self.router

    def left_s(self) -> float:
        """Seconds until the deadline of all tries; never below 0."""
        return max(0.0, self.deadline_at - self.clock())

    def reached(self) -> None:
        """The router of this try has answered."""
        if self.router is not None:
            self.pool.answered(self.router)

    def failed(self, error: PdserveError, *, answered: bool, begun: bool = False) -> float | None:
        """Seconds to wait before the next try; None: the error is the call's.

        answered: by a router, not by the connection. begun: a part of the answer is there, so never again.
        """
        assert self.router is not None
        if isinstance(error, Draining) or not answered:
            self.pool.failed(self.router)
        else:
            self.pool.answered(self.router)
        if begun or not self._safe(error, answered):
            return None
        wait_s = self._wait_s(error)
        return None if wait_s is None or wait_s >= self.left_s() else wait_s

    def _safe(self, error: PdserveError, answered: bool) -> bool:
        if isinstance(error, Overloaded):
            return error.retry_after_s is not None
        return isinstance(error, Unavailable) and (answered or self.repeats)

    def _wait_s(self, error: PdserveError) -> float | None:
        if self.only is None and self.pool.others(self._tried):
            return 0.0
        self._tried.clear()
        self._rounds += 1
        if self._rounds >= self.retry.attempts:
            return None
        hint = error.retry_after_s
        wait_s = FIRST_WAIT_S * 2 ** (self._rounds - 1) if hint is None else hint
        if hint is not None and hint > self.retry.max_wait_s:
            return None
        return min(wait_s, self.retry.max_wait_s) * (1 + self.chance() / 4)
