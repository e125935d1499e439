"""Prometheus metrics: the kinds we use, buckets for latencies, closed label sets, and the port to read them.

Here: making and serving. Not here: which metrics a router or worker has; each declares its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.errors import BY_LABEL, ConfigError
from pdserve.types import FinishReason, WorkerLoad

REQUEST_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.35,
    0.5,
    0.75,
    1.0,
    1.5,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
"""Seconds: TTFT, queue and prefill. Dense where targets lie (50 ms to 2.5 s)."""
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
"""Seconds: the gap between two tokens."""
TRANSFER_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
"""Seconds: moving pages."""
OUTCOMES = frozenset({*(str(reason) for reason in FinishReason), *BY_LABEL})
"""How a request can end: a finish reason, or the label of an error."""
PAGE_STATES = ("free", "evictable", "reserved", "filling", "sealed", "retiring", "quarantined")
OTHER = "other"


class ClosedCounter:
    """A counter whose label values come from closed sets; a value outside its set counts as "other"."""

    def __init__(self, counter: Counter, labels: Mapping[str, Iterable[str]]) -> None:
        self._counter = counter
        self._allowed = {name: frozenset(values) for name, values in labels.items()}

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Adds to one series. Raises ValueError if the label names are not the declared ones."""
        if labels.keys() != self._allowed.keys():
            raise ValueError("the label names are not the declared ones")
        closed = {name: value if value in self._allowed[name] else OTHER for name, value in labels.items()}
        self._counter.labels(**closed).inc(amount)


class Metrics:
    """Makes metrics in a registry of its own, so that two parts of a process never collide."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()

    def seconds(self, name: str, help_text: str, buckets: tuple[float, ...] = REQUEST_BUCKETS) -> Histogram:
        """A histogram `pdserve_<name>_seconds`."""
        return Histogram(f"pdserve_{name}_seconds", help_text, buckets=buckets, registry=self.registry)

    def counter(self, name: str, help_text: str, **labels: Iterable[str]) -> ClosedCounter:
        """A counter `pdserve_<name>_total`. labels: the allowed values of each."""
        made = Counter(f"pdserve_{name}", help_text, tuple(labels), registry=self.registry)
        return ClosedCounter(made, labels)

    def gauge(self, name: str, help_text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """A gauge `pdserve_<name>` with one label, read when it is scraped."""
        self.registry.register(_Gauge(f"pdserve_{name}", help_text, label, read))

    def pages(self, read: Callable[[], WorkerLoad]) -> None:
        """The gauge `pdserve_pages` by state, read when it is scraped."""
        self.gauge("pages", "KV pages by state.", "state", lambda: pages_by_state(read()))


def pages_by_state(load: WorkerLoad) -> dict[str, float]:
    """Page counts of a load by the state's name."""
    return {state: float(getattr(load, f"{state}_pages")) for state in PAGE_STATES}


class _Gauge(Collector):
    def __init__(
        self, name: str, help_text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._help, self._label, self._read = name, help_text, label, read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._help, labels=[self._label])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._help, labels=[self._label])
        for value, number in self._read().items():
            family.add_metric([value], number)
        yield family


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """The running HTTP port of a registry. port: the one it listens on."""

    port: int
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        """Stops listening and waits for it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def serve_metrics(port: int, host: str = "127.0.0.1", *, registry: CollectorRegistry) -> MetricsPort:
    """Serves `/metrics` on a thread. port 0 takes any free one. Raises ConfigError if it can not be had."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError:
        raise ConfigError("metrics_port: the port can not be listened on; choose another or 0") from None
    return MetricsPort(server.server_port, server, thread)
