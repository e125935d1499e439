"""A worker's Prometheus metrics: sums on the control thread, and the HTTP port that they are read from.

A scrape asks the control thread for a copy of everything at once, so figures belong together; only text is
made on the scrape's own thread. What lives here: which sum is what metric. What does not: the metrics
themselves (`pdserve.obs.catalogue.worker`), and counting (`kvtransfer.effects.Count`, `Measure`, the driver).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdserve.config.addresses import advertised, host_port
from pdserve.obs.catalogue import worker as names
from pdserve.obs.catalogue.kinds import AGES, Kind, Metric
from pdserve.obs.catalogue.vllm import WORKER_ALIASES
from pdserve.obs.metrics import kv_utilization, pages_by_state
from pdserve.obs.port import MetricsPort, serve_metrics
from pdserve.obs.tally import Labels, Sums, Tally, families
from pdserve.obs.vllm import VllmFacts, VllmNames
from pdserve.types import Role, UsedState, WorkerLoad

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""A control thread that does not answer a scrape within this time is not ready, and that is told."""
FIXED = ("role",)
DERIVED: Mapping[str, Metric] = {
    "retractions": names.PREEMPTIONS,
    "foreign_envelopes": names.FENCED_MESSAGES,
    "reads_mismatch": names.DIGEST_FAILURES,
}
"""Events that are a metric (too); see `Count`."""
OWN = frozenset({"steps", "step_rows", "retractions"})
"""Events that other metrics tell of whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a worker knows of itself at one moment, besides its sums. leases, credits: see the catalogue."""

    load: WorkerLoad
    page_bytes: int
    num_evicted: int = 0
    leases: int = 0
    credits: int = 0


class WorkerSums:
    """The sums of one worker's counters and histograms. Control thread only."""

    def __init__(self) -> None:
        self._tallies = {
            metric.name: Tally(metric, FIXED)
            for metric in names.WORKER
            if metric.kind is not Kind.GAUGE and metric not in (names.EVICTIONS, names.EVENTS_TOTAL)
        }
        self.counters: dict[str, int] = {}
        """Events by name, those that never happened left out."""

    def add(self, metric: Metric, value: float = 1.0, labels: Labels = ()) -> None:
        """Adds to a declared counter, or observes for a histogram."""
        self._tallies[metric.name].add(value, labels)

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to an event's counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def copy(self) -> list[Sums]:
        """All of them by now, with what events come to."""
        events = Tally(names.EVENTS_TOTAL, FIXED)
        extra: dict[str, int] = {}
        for name, amount in self.counters.items():
            if name not in OWN:
                events.add(amount, (name,))
            if name in DERIVED:
                extra[DERIVED[name].name] = amount
        found = [tally.copy() for tally in self._tallies.values()]
        return [_plus(sums, extra.get(sums.metric.name, 0)) for sums in found] + [events.copy()]


def _plus(sums: Sums, amount: int) -> Sums:
    """With an amount more, where a metric has no labels of its own."""
    return replace(sums, values={(): sums.values[()] + amount}) if amount else sums


def gauges(figures: Figures) -> Iterator[Sums]:
    """Figures of the moment as sums of one series each."""
    load = figures.load
    plain = {
        names.RUNNING: load.num_running,
        names.WAITING: load.num_waiting,
        names.WAITING_TOKENS: load.waiting_tokens,
        names.PAGE_BYTES: figures.page_bytes,
        names.KV_UTILIZATION: kv_utilization(load),
        names.LEASES: figures.leases,
        names.CREDITS: figures.credits,
        names.READY: load.ready and not load.draining,
        names.DRAINING: load.draining,
        names.EVICTIONS: figures.num_evicted,
    }
    for metric, value in plain.items():
        yield Sums(metric=metric, values={(): float(value)})
    states: dict[Labels, float] = {(state,): count for state, count in pages_by_state(load).items()}
    yield Sums(metric=names.PAGES, values=states)
    ages: dict[Labels, float] = {(str(use), age): 0.0 for use in UsedState for age in AGES}
    for of_use in load.page_ages:
        ages.update({(str(of_use.state), age): count for age, count in zip(AGES, of_use.counts, strict=True)})
    yield Sums(metric=names.USED_PAGES, values=ages)


class _Told:
    """What a scrape was told just now, by metric."""

    def __init__(self, told: list[Family]) -> None:
        self._samples = {family.name: family.samples for family in told}

    def samples(self, metric: Metric) -> Iterator[Sample]:
        """See `pdserve.obs.vllm.Samples`."""
        return iter(self._samples[metric.name.removesuffix("_total")])


class WorkerMetrics(Collector):
    """The port. `start`, `stop` and what `read` gives belong to the control thread."""

    def __init__(
        self,
        role: Role,
        read: Callable[[], tuple[Figures, list[Sums]]],
        loop: asyncio.AbstractEventLoop,
        vllm: VllmFacts | None = None,
    ) -> None:
        """read: figures and sums of this moment; called on the loop at each scrape. vllm: facts to tell under
        vLLM's names too (kv_usage is read at each scrape); None: its names are not served."""
        self._fixed = {"role": str(role)}
        self._read, self._loop, self._vllm = read, loop, vllm
        # Nothing is read before somebody asks: reading a load also takes a look at experts.
        self._last = (Figures(load=WorkerLoad(), page_bytes=0), WorkerSums().copy())
        self._port: MetricsPort | None = None

    def start(self, host: str, port: int) -> str:
        """Listens; returns the address for those who scrape. port 0: any free one. Raises ConfigError."""
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._port = serve_metrics(port, host, registry=registry)
        return advertised(host_port(host, self._port.port))

    async def stop(self) -> None:
        """Stops listening."""
        if self._port is not None:
            await asyncio.to_thread(self._port.close)
            self._port = None

    def collect(self) -> Iterator[Family]:
        """On the thread of a scrape: everything as it was at one moment."""
        figures, sums = self._now()
        told = list(families((*sums, *gauges(figures)), self._fixed))
        yield from told
        if self._vllm is not None:
            facts = replace(self._vllm, kv_usage=kv_utilization(figures.load))
            yield from VllmNames(_Told(told), WORKER_ALIASES, lambda: facts).collect()

    def _now(self) -> tuple[Figures, list[Sums]]:
        answer: concurrent.futures.Future[tuple[Figures, list[Sums]]] = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(self._read())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(ask)
            self._last = answer.result(ANSWER_S)
        except (TimeoutError, RuntimeError):  # it is stuck, or its loop is closed
            figures, sums = self._last
            return replace(figures, load=replace(figures.load, ready=False)), sums
        return self._last
