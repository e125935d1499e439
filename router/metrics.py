"""Prometheus metrics of a router and the port they are read from. Labels come from closed sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdserve.api import SecondsHistogram, Traffic
from pdserve.errors import BY_LABEL, ConfigError
from pdserve.obs.catalogue.kinds import PAGE_STATES
from pdserve.obs.ledger import path_seconds
from pdserve.types import AGE_LIMITS_S, REBALANCE_OUTCOMES, FinishReason, Ledger, Phase, Role, UsedState
from router.auth.refusals import Reason
from router.membership import Member

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_SHORT = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1.0)
_PHASE_SECONDS = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, *_SECONDS[4:])
OUTCOMES = frozenset([*FinishReason, *BY_LABEL])


AGES = (*(f"<{limit:g}s" for limit in AGE_LIMITS_S), "older")


class RouterMetrics:
    """All metrics of one router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.ttft = _histogram(registry, "ttft", "From admission of a request to its first token.")
        self.itl = _histogram(registry, "itl", "Between two tokens of a stream.", _GAPS)
        self.queue = _histogram(registry, "queue", "From admission to the first try.")
        self.prefill = _histogram(registry, "prefill", "Computing a prompt on a prefill worker.")
        self.transfer = _histogram(
            registry, "transfer", "From the first page announced to the last verified."
        )
        self.phases = Histogram(
            "pdserve_phase_seconds", "Phases on the way to the first token, and the first step after it.",
            ["phase"], buckets=_PHASE_SECONDS, registry=registry,
        )  # fmt: skip
        for phase in Phase:
            self.phases.labels(phase)
        self.residual = _histogram(
            registry, "ledger_residual", "TTFT that no phase accounts for, absolute.", _SHORT
        )
        self.handover = _histogram(
            registry,
            "handover",
            "From the last chunk computed to the first decode step.",
            _PHASE_SECONDS,
        )
        self.hidden = Histogram(
            "pdserve_wire_hidden_ratio", "Share of the wire time that is hidden behind compute.",
            buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0), registry=registry,
        )  # fmt: skip
        self._requests = Counter(
            "pdserve_requests", "Requests by outcome: a finish reason or an error label.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self._auth_failures = Counter(
            "pdserve_auth_failures", "Calls refused at the door, by why.", ["reason"], registry=registry
        )
        for reason in Reason:
            self._auth_failures.labels(reason)
        self.retries = Counter("pdserve_retries", "Tries after the first.", registry=registry)
        self.discarded = Counter(
            "pdserve_discarded_tokens", "Tokens that came after a stop text had matched.", registry=registry
        )
        self.ignored = Counter(
            "pdserve_ignored_tokens", "Tokens of given-up tries, and repeated ones.", registry=registry
        )
        self.sent = Counter("pdserve_sent_tokens", "Tokens that went to clients.", registry=registry)
        self.tokens = Counter("pdserve_tokens", "Tokens by kind.", ["kind"], registry=registry)
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind)

    def outcome(self, name: str) -> None:
        """Counts the end of a request. A name outside the closed set counts as "internal"."""
        self._requests.labels(name if name in OUTCOMES else "internal").inc()

    def auth_failure(self, reason: str) -> None:
        """Counts a caller that was not let in; one of `Reason`."""
        self._auth_failures.labels(Reason(reason)).inc()

    def ledger(self, ledger: Ledger, *, first_try: bool) -> None:
        """Observes the phases of a finished request. first_try: its first token came from its first try; else
        the residual holds what the failed ones took."""
        for phase, seconds in path_seconds(ledger).items():
            self.phases.labels(phase).observe(seconds)
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
        outcomes = {sample.labels["outcome"]: sample.value for sample in _samples(self._requests, "_total")}
        tokens = {sample.labels["kind"]: int(sample.value) for sample in _samples(self.tokens, "_total")}
        finished = sum(int(outcomes.get(reason, 0)) for reason in FinishReason)
        return Traffic(
            prompt_tokens=tokens["prompt"],
            cached_tokens=tokens["cached"],
            completion_tokens=int(next(_samples(self.sent, "_total")).value),
            finished_requests=finished,
            failed_requests=int(sum(outcomes.values())) - finished,
            ttft=_seconds(self.ttft),
            itl=_seconds(self.itl),
        )

    def watch(
        self,
        members: Callable[[], Iterable[Member]],
        counts: Callable[[], tuple[int, int]],
        insecure: bool,
    ) -> None:
        """Adds the gauges, read at each scrape. counts: (queued, running)."""
        self.registry.register(_Gauges(members, counts, insecure))

    def serve(self, host: str, port: int) -> MetricsPort:
        """Starts the HTTP port. Raises ConfigError if it can not be had."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError:
            raise ConfigError(
                f"metrics_port: port {port} can not be listened on; is it in use? Choose another."
            ) from None
        return MetricsPort(server, thread)


def _samples(metric: Collector, suffix: str) -> Iterator[Sample]:
    """The samples of a metric whose name ends so."""
    return (s for family in metric.collect() for s in family.samples if s.name.endswith(suffix))


def _seconds(metric: Histogram) -> SecondsHistogram:
    """A histogram's counts by bucket; Prometheus gives them cumulated."""
    buckets = [(float(s.labels["le"]), int(s.value)) for s in _samples(metric, "_bucket")]
    below = [0, *(count for _, count in buckets)]
    return SecondsHistogram(
        bounds=tuple(bound for bound, _ in buckets[:-1]),
        counts=tuple(high - low for low, high in itertools.pairwise(below)),
        sum=next(_samples(metric, "_sum")).value,
    )


class MetricsPort:
    """The running HTTP port of the metrics."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _histogram(
    registry: CollectorRegistry, name: str, help_text: str, buckets: tuple[float, ...] = _SECONDS
) -> Histogram:
    return Histogram(f"pdserve_{name}_seconds", help_text, buckets=buckets, registry=registry)


class _Gauges(Collector):
    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        counts: Callable[[], tuple[int, int]],
        insecure: bool,
    ) -> None:
        self._members, self._counts, self._insecure = members, counts, insecure

    def collect(self) -> Iterator[GaugeMetricFamily]:
        members = list(self._members())
        pages = GaugeMetricFamily("pdserve_pages", "KV pages by state.", labels=["role", "state"])
        yield from _used_pages(members)
        workers = GaugeMetricFamily("pdserve_workers", "Workers registered.", labels=["role"])
        for role in Role:
            of_role = [member for member in members if member.record.role is role]
            workers.add_metric([role], len(of_role))
            for state in PAGE_STATES:
                total = sum(getattr(member.load, f"{state}_pages") for member in of_role)
                pages.add_metric([role, state], total)
        yield from _experts(members)
        queued, running = self._counts()
        yield pages
        yield workers
        yield GaugeMetricFamily("pdserve_queued_requests", "Requests that wait for workers.", value=queued)
        yield GaugeMetricFamily("pdserve_running_requests", "Requests sent to workers.", value=running)
        yield GaugeMetricFamily(
            "pdserve_insecure",
            "1 if --insecure was given: no TLS beyond loopback.",
            value=int(self._insecure),
        )


def _used_pages(members: list[Member]) -> Iterator[GaugeMetricFamily]:
    """Memory in use by what for and how long: what is stranded has a name here."""
    ages = GaugeMetricFamily(
        "pdserve_used_pages", "KV pages neither free nor evictable, by use and age.",
        labels=["role", "state", "age"],
    )  # fmt: skip
    size = GaugeMetricFamily(
        "pdserve_used_page_bytes", "Bytes of KV pages neither free nor evictable, by use and age.",
        labels=["role", "state", "age"],
    )  # fmt: skip
    held = GaugeMetricFamily("pdserve_transfer_bytes", "Bytes held for transfers.", labels=["role"])
    peak = GaugeMetricFamily("pdserve_transfer_peak_bytes", "The most there ever were.", labels=["role"])
    for role in Role:
        of_role = [member for member in members if member.record.role is role]
        counts: dict[tuple[str, str], int] = {(use, age): 0 for use in UsedState for age in AGES}
        total = dict.fromkeys(counts, 0)
        for member in of_role:
            for used in member.load.page_ages:
                for age, count in zip(AGES, used.counts, strict=True):
                    counts[used.state, age] += count
                    total[used.state, age] += count * member.record.capability.page_bytes
        for (use, age), count in counts.items():
            ages.add_metric([role, use, age], count)
            size.add_metric([role, use, age], total[use, age])
        held.add_metric([role], sum(_bytes(m, m.load.transfer_pages) for m in of_role))
        peak.add_metric([role], sum(_bytes(m, m.load.peak_transfer_pages) for m in of_role))
    yield from (ages, size, held, peak)


def _experts(members: list[Member]) -> Iterator[GaugeMetricFamily]:
    """Of the workers that are here now: what a worker counted is gone with its incarnation."""
    moves = GaugeMetricFamily(
        "pdserve_rebalances", "Placements of experts by how they ended.", labels=["role", "outcome"]
    )
    copied = GaugeMetricFamily(
        "pdserve_expert_copied_bytes", "Weights that came to other ranks.", labels=["role"]
    )
    uneven = GaugeMetricFamily(
        "pdserve_expert_imbalance", "Load of the fullest ranks over the mean; the worst worker's.",
        labels=["role"],
    )  # fmt: skip
    loss = GaugeMetricFamily(
        "pdserve_expert_balance_loss", "Auxiliary balance loss of routers, 1 if even; the worst worker's.",
        labels=["role"],
    )  # fmt: skip
    lost = GaugeMetricFamily(
        "pdserve_lost_ranks", "Ranks that workers go on without, degraded.", labels=["role"]
    )
    for role in Role:
        loads = [member.load for member in members if member.record.role is role]
        for outcome in REBALANCE_OUTCOMES:
            moves.add_metric([role, outcome], sum(getattr(load, f"rebalances_{outcome}") for load in loads))
        copied.add_metric([role], sum(load.expert_copied_bytes for load in loads))
        lost.add_metric([role], sum(load.lost_ranks for load in loads))
        uneven.add_metric([role], max((load.expert_imbalance for load in loads), default=0.0))
        loss.add_metric([role], max((load.expert_balance_loss for load in loads), default=0.0))
    yield from (moves, copied, uneven, loss, lost)


def _bytes(member: Member, pages: int) -> int:
    return pages * member.record.capability.page_bytes
