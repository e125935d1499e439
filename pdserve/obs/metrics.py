"""Prometheus metrics of one process: its declared ones, all series there from the start.

Here: what counts, over `pdserve.obs.catalogue`; gauges are read at a scrape. Not here: the port to read them
from (`pdserve.obs.port`), and when something is counted; each process knows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdserve.obs.catalogue.kinds import PAGE_STATES, Kind, Metric
from pdserve.types import WorkerLoad

disable_created_metrics()  # type: ignore[no-untyped-call] # when each series began: as many again, for nothing


class Readings:
    """Values of gauges at one moment; a series without a value is 0."""

    def __init__(self, metrics: Iterable[Metric], fixed: Mapping[str, str]) -> None:
        self._fixed = fixed
        self._values = {metric: dict.fromkeys(_series(metric, fixed), 0.0) for metric in metrics}

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """One series' value. Raises ValueError for one that is not declared."""
        series = _values(metric, {**self._fixed, **labels})
        if series not in self._values[metric]:
            raise ValueError(f"{metric.name}: there is no such series")
        self._values[metric][series] = float(value)

    def __iter__(self) -> Iterator[tuple[Metric, dict[tuple[str, ...], float]]]:
        """Each gauge with its series' values."""
        return iter(self._values.items())


class MetricSet:
    """The metrics of a process in a registry of their own, with those of the process itself."""

    def __init__(self, declared: Iterable[Metric], fixed: Mapping[str, str] | None = None) -> None:
        """fixed: labels whose value is the same in all series here, such as a worker's role.

        Raises ValueError if a label has no values and none is fixed.
        """
        self.registry = CollectorRegistry()
        self.declared = tuple(declared)
        self._fixed = dict(fixed or {})
        self._counters: dict[tuple[str, tuple[str, ...]], Counter] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._made: dict[str, Counter | Histogram] = {}
        for metric in self.declared:
            if metric.kind is not Kind.GAUGE:
                self._make(metric)
        gauges = [metric for metric in self.declared if metric.kind is Kind.GAUGE]
        self._gauges = _Gauges(gauges, self._fixed)
        self.registry.register(self._gauges)
        ProcessCollector(registry=self.registry)

    def _make(self, metric: Metric) -> None:
        made: Counter | Histogram
        names = metric.label_names
        if metric.kind is Kind.COUNTER:
            made = Counter(metric.name, metric.help, names, registry=self.registry)
            for series in _series(metric, self._fixed):
                self._counters[metric.name, series] = made.labels(*series) if names else made
        else:
            made = Histogram(metric.name, metric.help, names, buckets=metric.buckets, registry=self.registry)
            for series in _series(metric, self._fixed):
                self._histograms[metric.name, series] = made.labels(*series) if names else made
        self._made[metric.name] = made

    def counter(self, metric: Metric, **labels: str) -> Counter:
        """One series of a counter, to keep and `inc`. Raises KeyError for one that is not declared."""
        return self._counters[metric.name, _values(metric, {**self._fixed, **labels})]

    def histogram(self, metric: Metric, **labels: str) -> Histogram:
        """One series of a histogram, to keep and `observe`. Raises KeyError for one that is not declared."""
        return self._histograms[metric.name, _values(metric, {**self._fixed, **labels})]

    def watch(self, read: Callable[[Readings], None]) -> None:
        """Calls `read` at each scrape, on the scraping thread, to set gauges."""
        self._gauges.readers.append(read)

    def samples(self, metric: Metric) -> Iterator[Sample]:
        """The samples of a counter, histogram or gauge now."""
        families = self._made[metric.name].collect() if metric.name in self._made else self._gauges.collect()
        for family in families:
            if family.name in (metric.name, metric.name.removesuffix("_total")):
                yield from family.samples


class _Gauges(Collector):
    def __init__(self, metrics: list[Metric], fixed: Mapping[str, str]) -> None:
        self._metrics, self._fixed = metrics, fixed
        self.readers: list[Callable[[Readings], None]] = []
        Readings(metrics, fixed)  # raises for a label without values

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return (GaugeMetricFamily(m.name, m.help, labels=m.label_names) for m in self._metrics)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        readings = Readings(self._metrics, self._fixed)
        for read in self.readers:
            read(readings)
        for metric, values in readings:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.label_names)
            for series, value in values.items():
                family.add_metric(series, value)
            yield family


def _values(metric: Metric, labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(str(labels[label.name]) for label in metric.labels)


def _series(metric: Metric, fixed: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Label values of all series a metric has in a process with these fixed ones."""
    values = [(fixed[label.name],) if label.name in fixed else label.values for label in metric.labels]
    for label, allowed in zip(metric.labels, values, strict=True):
        if not allowed:
            raise ValueError(f"{metric.name}: the label {label.name} has no value")
    return itertools.product(*values)


def pages_by_state(load: WorkerLoad) -> dict[str, int]:
    """Page counts of a load by the state's name."""
    return {state: int(getattr(load, f"{state}_pages")) for state in PAGE_STATES}


def kv_utilization(load: WorkerLoad) -> float:
    """Pages neither free nor evictable over all pages, 0 to 1; 0 before a worker has told them."""
    used = sum(count for state, count in pages_by_state(load).items() if state not in ("free", "evictable"))
    return used / load.num_pages if load.num_pages else 0.0
