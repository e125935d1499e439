"""The fleet's own HTTP port: `/metrics`, and whether it is ready and alive, for those who look after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.fleet.supervise import SlotState
from pdserve.fleet.watch import FleetWatch
from pdserve.obs.catalogue.fleet import RESTARTS, WANTED_WORKERS, WORKERS
from pdserve.obs.port import MetricsPort, Page, serve_metrics
from pdserve.types import Role


@contextlib.contextmanager
def fleet_port(watch: FleetWatch, port: int, host: str) -> Iterator[MetricsPort]:
    """Serves the pages for the time of the block. Raises ConfigError if the port can not be had."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(watch))
    ProcessCollector(registry=registry)
    pages = {
        "/readyz": lambda: _page(
            watch.ready(), "every wanted worker serves", "a wanted worker does not serve"
        ),
        "/livez": lambda: _page(not watch.lost(), "the fleet answers", "the fleet does not answer"),
    }
    served = serve_metrics(port, host, registry=registry, pages=pages, setting="fleet_port")
    try:
        yield served
    finally:
        served.close()


def _page(good: bool, yes: str, no: str) -> Page:
    return Page(body=f"{yes if good else no}\n".encode(), status=200 if good else 503)


class FleetCollector(Collector):
    """The fleet's metrics, made from the controller's last word when they are read."""

    def __init__(self, watch: FleetWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterable[Metric]:
        """Every series is there from the start, also before the controller's first answer."""
        status = self._watch.status() or {"wanted": {}, "workers": []}
        wanted = GaugeMetricFamily(
            WANTED_WORKERS.name, WANTED_WORKERS.help, labels=WANTED_WORKERS.label_names
        )
        workers = GaugeMetricFamily(WORKERS.name, WORKERS.help, labels=WORKERS.label_names)
        restarts = CounterMetricFamily(RESTARTS.name, RESTARTS.help, labels=RESTARTS.label_names)
        for role in Role:
            slots = [slot for slot in status["workers"] if slot["role"] == role]
            wanted.add_metric([role], status["wanted"].get(role, 0))
            restarts.add_metric([role], status.get("restarts", {}).get(role, 0))
            for state in SlotState:
                workers.add_metric([role, state], sum(slot["state"] == state for slot in slots))
        return wanted, workers, restarts
