"""vLLM's names over metrics of ours, made at a scrape: nothing is counted twice.

Here: the collector. Not here: which names there are (`pdserve.obs.catalogue.vllm`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdserve.obs.catalogue import vllm
from pdserve.obs.catalogue.kinds import Kind, Metric

ENGINE = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """What vLLM's names tell beside our metrics. model: its name. kv_usage: 0 to 1. page_size: tokens of a
    page. num_pages: of the pool; of all pools where there are several."""

    model: str
    kv_usage: float
    page_size: int
    num_pages: int


class Samples(Protocol):
    """Metrics that can be read one by one."""

    def samples(self, metric: Metric) -> Iterator[Sample]:
        """All samples of a metric now, without those that tell when a series began."""
        ...


class VllmNames(Collector):
    """The metrics of one process under vLLM's names."""

    def __init__(
        self, metrics: Samples, aliases: Sequence[vllm.Alias], read: Callable[[], VllmFacts | None]
    ) -> None:
        """read: called at each scrape; None while no model is known: there is nothing to tell then."""
        self._metrics, self._aliases, self._read = metrics, aliases, read

    def describe(self) -> Iterator[Family]:
        names = (*vllm.COMPUTED_AT_SCRAPE, *(alias.metric for alias in self._aliases))
        return (_family(metric) for metric in names)

    def collect(self) -> Iterator[Family]:
        facts = self._read()
        if facts is None:
            return
        common = {"model_name": facts.model, "engine": ENGINE}
        for metric in (vllm.KV_USAGE, vllm.GPU_CACHE_USAGE):
            yield _one(metric, common, facts.kv_usage)
        blocks = {"block_size": str(facts.page_size), "num_gpu_blocks": str(facts.num_pages)}
        yield _one(vllm.CACHE_CONFIG, common | blocks, 1)
        yield _one(vllm.LORA_REQUESTS, next(vllm.LORA_REQUESTS.combinations()), time.time())
        for alias in self._aliases:
            yield self._alias(alias, common)

    def _alias(self, alias: vllm.Alias, common: dict[str, str]) -> Family:
        """Our series, summed by what stays of their labels: a histogram's bound, a label that is kept."""
        sums: dict[tuple[str, str, str], float] = {}
        for sample in self._metrics.samples(alias.source):
            value = sample.labels.get(alias.label, "")
            if alias.values and value not in alias.values:
                continue
            key = (_suffix(sample, alias.source), value if alias.keep else "", sample.labels.get("le", ""))
            sums[key] = sums.get(key, 0.0) + sample.value
        family = _family(alias.metric)
        base = family.name
        for (suffix, kept, bound), total in sums.items():
            labels = dict(common)
            labels |= {alias.keep: kept} if alias.keep else {}
            labels |= {"le": bound} if bound else {}
            family.add_sample(base + suffix, labels, total)
        return family


def _suffix(sample: Sample, source: Metric) -> str:
    return sample.name.removeprefix(source.name.removesuffix("_total" if source.kind is Kind.COUNTER else ""))


def _family(metric: Metric) -> Family:
    name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
    return Family(name, metric.help, str(metric.kind))


def _one(metric: Metric, labels: dict[str, str], value: float) -> Family:
    family = _family(metric)
    family.add_sample(metric.name, labels, value)
    return family
