"""The catalogue of metrics and what counts over it, read back by Prometheus' own parser."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError
from pdserve.fleet.supervise import SlotState
from pdserve.obs import catalogue
from pdserve.obs.catalogue import Kind, Label, Metric, fleet, router, worker
from pdserve.obs.catalogue.kinds import PAGE_STATES
from pdserve.obs.metrics import MetricSet, Readings, kv_utilization, pages_by_state
from pdserve.obs.port import MetricsPort, Page, serve_metrics
from pdserve.types import Usage, WorkerLoad
from router.auth.refusals import Reason
from router.metrics import RouterMetrics

LOAD = WorkerLoad(num_pages=8, free_pages=4, evictable_pages=1, sealed_pages=3)


@pytest.fixture
def port() -> Iterator[tuple[MetricSet, MetricsPort]]:
    metrics = MetricSet(catalogue.ROUTER, {"version": "1"})
    pages = {"/targets": lambda: Page(body=b"[]", content="application/json")}
    serving = serve_metrics(0, registry=metrics.registry, pages=pages)
    yield metrics, serving
    serving.close()


def get(serving: MetricsPort, path: str, method: str = "GET") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{serving.port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def scrape(serving: MetricsPort) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(get(serving, "/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_every_declared_series_is_there_from_the_start(port: tuple[MetricSet, MetricsPort]) -> None:
    found = scrape(port[1])
    for metric in catalogue.ROUTER:
        name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
        number = 1
        for label in metric.labels:
            number *= max(1, len(label.values))
        assert len(found[name]) == number, name
    assert all(metric.name in found for metric in catalogue.PROCESS)


def test_what_is_counted_is_read_back(port: tuple[MetricSet, MetricsPort]) -> None:
    metrics, serving = port
    metrics.histogram(router.ITL, mode="local").observe(0.004)
    metrics.counter(router.REQUESTS, outcome="stop").inc(2)

    def read(into: Readings) -> None:
        for state, number in pages_by_state(LOAD).items():
            into.set(router.PAGES, number, role="decode", state=state)

    metrics.watch(read)
    found = scrape(serving)
    assert found["pdserve_requests_total"]["stop",] == 2
    assert found["pdserve_itl_seconds_bucket"]["0.005", "local"] == 1
    assert found["pdserve_itl_seconds_bucket"]["0.0025", "local"] == 0
    assert {s: found["pdserve_pages"]["decode", s] for s in PAGE_STATES} == pages_by_state(LOAD)
    assert sum(s.value for s in metrics.samples(router.PAGES)) == LOAD.num_pages
    assert kv_utilization(LOAD) == 3 / 8


def test_no_series_is_made_that_is_not_declared(port: tuple[MetricSet, MetricsPort]) -> None:
    metrics, _ = port
    with pytest.raises(KeyError):
        metrics.counter(router.REQUESTS, outcome="made up")
    with pytest.raises(KeyError):
        metrics.histogram(router.TTFT, mode="made up")
    with pytest.raises(ValueError, match="no such series"):
        Readings([router.PAGES], {}).set(router.PAGES, 1, role="decode", state="made up")
    with pytest.raises(ValueError, match="version has no value"):
        MetricSet([router.BUILD_INFO])


def test_a_fixed_label_has_one_value() -> None:
    metrics = MetricSet(catalogue.WORKER, {"role": "decode"})
    metrics.counter(worker.EVICTIONS).inc(3)
    (sample,) = metrics.samples(worker.EVICTIONS)
    assert (sample.labels, sample.value) == ({"role": "decode"}, 3)
    assert {s.labels["role"] for m in catalogue.WORKER for s in metrics.samples(m)} == {"decode"}


def test_the_port_has_pages_and_nothing_else(port: tuple[MetricSet, MetricsPort]) -> None:
    assert get(port[1], "/targets") == "[]"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port[1], "/other")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        get(port[1], "/metrics", "POST")


def test_a_port_in_use_is_a_config_error_and_loopback_is_the_default() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics_port"):
            serve_metrics(taken.getsockname()[1], registry=MetricSet([]).registry)


def test_names_labels_and_help_are_as_prometheus_wants_them() -> None:
    for metric in catalogue.BY_NAME.values():
        assert re.fullmatch(r"(pdserve_|process_|vllm:)[a-z0-9_]+", metric.name)
        assert metric.help.endswith("."), metric.name
        assert len(set(metric.label_names)) == len(metric.labels)
        assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(m.name.startswith("pdserve_worker_") for m in catalogue.WORKER)
    assert all(m.labels[0].name == "role" for m in catalogue.WORKER)
    assert all(m.name.startswith("pdserve_fleet_") for m in catalogue.FLEET)
    with pytest.raises(ValueError, match="_total"):
        Metric(name="x", kind=Kind.COUNTER, help="X.")
    with pytest.raises(ValueError, match="buckets"):
        Metric(name="x", kind=Kind.GAUGE, help="X.", labels=(Label("a"),), buckets=(1,))


def test_closed_sets_are_those_of_the_code() -> None:
    assert set(router.AUTH_REASONS) == {str(reason) for reason in Reason}
    assert set(fleet.SLOT_STATE.values) == {str(state) for state in SlotState}


def test_a_reason_that_is_not_declared_ends_no_request() -> None:
    metrics = RouterMetrics()
    metrics.shed("unforeseen")
    metrics.auth_failure("unforeseen")
    metrics.outcome("unforeseen")
    metrics.prompt(Usage(prompt_tokens=1, cached_tokens=2))
    assert metrics.traffic().failed_requests == 1
