"""Prometheus metrics of a router: what it counts, and the port they are read from.

Names, labels and buckets: `pdserve.obs.catalogue.router`. Not here: gauges of the fleet (`fleet_gauges`), and
what one run of a request counts (`run_metrics`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Histogram

from pdserve import __version__
from pdserve.api import SecondsHistogram, Traffic
from pdserve.obs.catalogue import ROUTER, Metric
from pdserve.obs.catalogue import router as names
from pdserve.obs.catalogue.vllm import ROUTER_ALIASES
from pdserve.obs.ledger import path_seconds
from pdserve.obs.metrics import MetricSet, Readings
from pdserve.obs.port import MetricsPort, Page, serve_metrics
from pdserve.obs.vllm import VllmFacts, VllmNames
from pdserve.types import FinishReason, Ledger, Phase, Usage

log = logging.getLogger(__name__)

MODES = names.MODE.values
_INTERNAL = "internal"


class RouterMetrics:
    """All metrics of one router, in a registry of its own. Attributes are series to count in."""

    def __init__(self, *, slo_ttft_s: float = 2.0, slo_itl_s: float = 0.1) -> None:
        """slo_ttft_s, slo_itl_s: objectives of a request's first token and of its mean gap."""
        self._set = made = MetricSet(ROUTER, {"version": __version__})
        self.registry = made.registry
        self._slo = {"ttft": slo_ttft_s, "itl": slo_itl_s}
        self.ttft = self._by_mode(names.TTFT)
        self.itl = self._by_mode(names.ITL)
        self.e2e = self._by_mode(names.E2E)
        self.handovers = {mode: made.counter(names.HANDOVERS, mode=mode) for mode in MODES}
        self.queue = made.histogram(names.QUEUE)
        self.prefill = made.histogram(names.PREFILL)
        self.transfer = made.histogram(names.TRANSFER)
        self.phases = {phase: made.histogram(names.PHASES, phase=phase) for phase in Phase}
        self.residual = made.histogram(names.RESIDUAL)
        self.handover = made.histogram(names.HANDOVER)
        self.hidden = made.histogram(names.WIRE_HIDDEN)
        self.prompt_length = made.histogram(names.PROMPT_LENGTH)
        self.completion_length = made.histogram(names.COMPLETION_LENGTH)
        self._requests = {o: made.counter(names.REQUESTS, outcome=o) for o in names.OUTCOMES}
        self.retries = made.counter(names.RETRIES)
        self.discarded = made.counter(names.DISCARDED_TOKENS)
        self.ignored = made.counter(names.IGNORED_TOKENS)
        self.sent = made.counter(names.SENT_TOKENS)
        self.tokens = {k: made.counter(names.TOKENS, kind=k) for k in ("prompt", "cached", "completion")}
        self._sources = {s: made.counter(names.PROMPT_TOKENS, source=s) for s in names.PROMPT_SOURCES}

    def _by_mode(self, metric: Metric) -> dict[str, Histogram]:
        return {mode: self._set.histogram(metric, mode=mode) for mode in MODES}

    def outcome(self, name: str) -> None:
        """Counts the end of a request. A name outside the closed set counts as "internal"."""
        self._requests[name if name in self._requests else _INTERNAL].inc()

    def shed(self, reason: str) -> None:
        """Counts a request without room or time; one of `SHED_REASONS`."""
        self._count(names.SHED, reason=reason)

    def auth_failure(self, reason: str) -> None:
        """Counts a caller that was not let in; one of `router.auth.refusals.Reason`."""
        self._count(names.AUTH_FAILURES, reason=reason)

    def finished(self, mode: str, seconds: float, usage: Usage) -> None:
        """Observes a request that finished. seconds: from its admission."""
        self.e2e[mode].observe(seconds)
        self.prompt_length.observe(usage.prompt_tokens)
        self.completion_length.observe(usage.completion_tokens)

    def objective(self, name: str, seconds: float) -> None:
        """Counts whether a finished request met an objective, "ttft" or "itl"."""
        met = "yes" if seconds <= self._slo[name] else "no"
        self._count(names.SLO_REQUESTS, objective=name, met=met)

    def _count(self, metric: Metric, **labels: str) -> None:
        """One more; without a series of that name none: no metric may end a request."""
        try:
            self._set.counter(metric, **labels).inc()
        except KeyError:
            log.error("%s has no series %s", metric.name, labels)

    def prompt(self, usage: Usage, ledger: Ledger | None = None) -> None:
        """Counts a prompt's tokens, and where their pages came from. ledger: None for one that was only
        evaluated, on one worker."""
        self.tokens["prompt"].inc(usage.prompt_tokens)
        self.tokens["cached"].inc(usage.cached_tokens)
        if ledger is None:
            self._sources["computed"].inc(max(0, usage.prompt_tokens - usage.cached_tokens))
            self._sources["hit_prefill"].inc(usage.cached_tokens)
            return
        here = ledger.decode_computed_prompt_tokens
        self._sources["computed"].inc(ledger.prefill_computed_tokens + here)
        self._sources["hit_prefill"].inc(ledger.prefill_cached_tokens)
        self._sources["hit_decode"].inc(ledger.decode_hit_tokens)
        if ledger.transfer.pages:
            moved = usage.prompt_tokens - ledger.decode_hit_tokens - here
            self._sources["transferred"].inc(max(0, moved))

    def ledger(self, ledger: Ledger, *, first_try: bool) -> None:
        """Observes the phases of a finished request. first_try: its first token came from its first try; else
        the residual holds what the failed ones took."""
        for phase, seconds in path_seconds(ledger).items():
            self.phases[phase].observe(seconds)
        if ledger.residual_s is not None and first_try:
            self.residual.observe(abs(ledger.residual_s))
        if ledger.handover_s is not None and ledger.transfer.path:
            self.handover.observe(max(0.0, ledger.handover_s))
        if ledger.wire_hidden is not None:
            self.hidden.observe(ledger.wire_hidden)
        if ledger.prefill_computed_tokens:
            self.prefill.observe(ledger.prefill_compute_s)
        if ledger.transfer.pages:
            self.transfer.observe(ledger.transfer_s)

    def traffic(self) -> Traffic:
        """What the router did since it started, from the same counters that Prometheus reads."""
        outcomes = self._by_label(names.REQUESTS, "outcome")
        tokens = self._by_label(names.TOKENS, "kind")
        finished = sum(outcomes[reason] for reason in FinishReason)
        return Traffic(
            prompt_tokens=tokens["prompt"],
            cached_tokens=tokens["cached"],
            completion_tokens=int(next(self._set.samples(names.SENT_TOKENS)).value),
            finished_requests=finished,
            failed_requests=sum(outcomes.values()) - finished,
            ttft=self._seconds(names.TTFT),
            itl=self._seconds(names.ITL),
        )

    def _by_label(self, metric: Metric, label: str) -> dict[str, int]:
        return {sample.labels[label]: int(sample.value) for sample in self._set.samples(metric)}

    def _seconds(self, metric: Metric) -> SecondsHistogram:
        """A histogram's counts by bucket, over all modes; Prometheus gives them cumulated."""
        samples = list(self._set.samples(metric))
        below: dict[float, int] = {}
        for sample in samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                below[bound] = below.get(bound, 0) + int(sample.value)
        bounds = sorted(below)
        return SecondsHistogram(
            bounds=tuple(bounds[:-1]),
            counts=tuple(_steps([below[bound] for bound in bounds])),
            sum=sum(sample.value for sample in samples if sample.name.endswith("_sum")),
        )

    def watch(self, read: Callable[[Readings], None]) -> None:
        """Adds gauges: `read` sets them at each scrape, on the thread that scrapes."""
        self._set.watch(read)

    def add_vllm_names(self, read: Callable[[], VllmFacts | None]) -> None:
        """Serves vLLM's names too. read: what they need beside our metrics; None: nothing is known yet."""
        self.registry.register(VllmNames(self._set, ROUTER_ALIASES, read))

    def serve(
        self, host: str, port: int, pages: Mapping[str, Callable[[], Page]] | None = None
    ) -> MetricsPort:
        """Starts the HTTP port. pages: by path, beside `/metrics`. Raises ConfigError."""
        return serve_metrics(port, host, registry=self.registry, pages=pages)


def _steps(cumulated: Sequence[int]) -> Iterator[int]:
    return (high - low for low, high in itertools.pairwise([0, *cumulated]))
