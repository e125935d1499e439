"""Counters and histograms that one thread adds to, as plain numbers; Prometheus reads a copy of them.

An addition costs a fraction of a microsecond and takes no lock, so it may stand on the way of every step and
page. Here: the sums of declared metrics, and their form for Prometheus. Not here: which metrics there are
(`pdserve.obs.catalogue`), and how a copy gets to the thread that answers a scrape.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from pdserve.obs.catalogue.kinds import OTHER, Kind, Metric

log = logging.getLogger(__name__)

Labels = tuple[str, ...]
"""Values of a metric's labels in order, without those that are fixed for the process."""


@dataclass(slots=True)
class _Series:
    """A histogram's: observations by bucket (the last: above all bounds), and their sum."""

    counts: list[int]
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Copied sums of a metric: values by labels; of a histogram, counts by bucket and the sum of values."""

    metric: Metric
    values: Mapping[Labels, float] = field(default_factory=dict)
    series: Mapping[Labels, tuple[tuple[int, ...], float]] = field(default_factory=dict)


class Tally:
    """The sums of one counter or histogram. Every series is there from the start. One thread calls it."""

    def __init__(self, metric: Metric, fixed: Iterable[str] = ()) -> None:
        """fixed: names of labels whose value does not change within the process; they are left out here."""
        open_labels = [label.values for label in metric.labels if label.name not in set(fixed)]
        keys = list(itertools.product(*open_labels))
        self.metric = metric
        self._bounds = metric.buckets
        self._values: dict[Labels, float] = {}
        self._series: dict[Labels, _Series] = {}
        if metric.kind is Kind.HISTOGRAM:
            self._series = {key: _Series([0] * (len(metric.buckets) + 1)) for key in keys}
        else:
            self._values = dict.fromkeys(keys, 0.0)

    def add(self, value: float = 1.0, labels: Labels = ()) -> None:
        """Adds an amount to a counter, or an observation to a histogram. A label's value outside its set
        counts as "other" where there is that, else not at all: no metric may end a worker."""
        series = self._series.get(labels)
        if series is not None:
            series.counts[bisect_left(self._bounds, value)] += 1
            series.total += value
        elif labels in self._values:
            self._values[labels] += value
        elif labels != (OTHER,) and (OTHER,) in self._values:
            self._values[OTHER,] += value
        else:
            log.error("%s has no series %s", self.metric.name, labels)

    def copy(self) -> Sums:
        """What there is by now."""
        series = {key: (tuple(one.counts), one.total) for key, one in self._series.items()}
        return Sums(metric=self.metric, values=dict(self._values), series=series)


def families(sums: Iterable[Sums], fixed: Mapping[str, str]) -> Iterator[Family]:
    """Metrics as Prometheus' client writes them out. fixed: the labels left out before, with their values."""
    for one in sums:
        metric = one.metric
        names = metric.label_names
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
            for key, (counts, total) in one.series.items():
                bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
                buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
                histogram.add_metric(_whole(names, key, fixed), buckets, total)
            yield histogram
            continue
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=names)
        for key, value in one.values.items():
            family.add_metric(_whole(names, key, fixed), value)
        yield family


def _whole(names: Labels, key: Labels, fixed: Mapping[str, str]) -> list[str]:
    """All label values in order."""
    rest = iter(key)
    return [fixed[name] if name in fixed else next(rest) for name in names]
