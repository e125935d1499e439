"""What one run of a request counts, from its first try to its end, and the moments that takes.

Here: when which metric moves. Not here: the metrics (`metrics`), and the request as a whole (`hub`).
"""

from __future__ import annotations

from pdserve.types import HandoverMode, Role
from router.events import EndStream
from router.metrics import RouterMetrics

AGGREGATED = str(Role.AGGREGATED)


class RunMetrics:
    """One run's times, on the router's clock; 0: not yet. mode: of `MODES`, who computed its prompt."""

    def __init__(self, metrics: RouterMetrics, *, part: bool, started_at: float, queued_at: float) -> None:
        """part: another run of the request has computed its prompt, and is counted for it."""
        self._metrics, self._part = metrics, part
        self.started_at, self.queued_at = started_at, queued_at
        self.tried_at = self.first_at = self.last_at = 0.0
        self.mode = str(HandoverMode.LOCAL)

    def tried(self, now: float, *, first: bool) -> None:
        """A try goes to its workers."""
        self.tried_at = self.tried_at or now
        if first and not self._part:
            self._metrics.queue.observe(now - self.queued_at)

    def token(self, now: float, mode: HandoverMode, role: Role | None) -> None:
        """A token goes to the client. mode, role: of its try and its worker; the first token's count."""
        metrics = self._metrics
        if self.last_at:
            metrics.itl[self.mode].observe(now - self.last_at)
        else:
            local = mode is HandoverMode.LOCAL
            self.mode = AGGREGATED if local and role is Role.AGGREGATED else str(mode)
            self.first_at = now
            if not self._part:
                metrics.ttft[self.mode].observe(now - self.started_at)
                metrics.handovers[self.mode].inc()
        self.last_at = now
        metrics.sent.inc()

    def ended(self, end: EndStream, *, ignored: int, first_try: bool) -> None:
        """The run is over. ignored: tokens of given-up tries. first_try: see `RouterMetrics.ledger`."""
        metrics, tokens = self._metrics, end.usage.completion_tokens
        metrics.discarded.inc(end.discarded)
        metrics.ignored.inc(ignored)
        metrics.tokens["completion"].inc(tokens)
        if self._part:
            return
        metrics.prompt(end.usage, end.ledger)
        metrics.ledger(end.ledger, first_try=first_try)
        if end.finish is not None and self.first_at:
            metrics.objective("ttft", self.first_at - self.started_at)
            if tokens > 1:
                metrics.objective("itl", (self.last_at - self.first_at) / (tokens - 1))
