"""The dashboards as data: for Grafana (`deploy/grafana`), for `pdserve dashboards`, and for tests."""

from __future__ import annotations

from pdserve.obs.dashboards.breakeven import BREAK_EVEN
from pdserve.obs.dashboards.decode import DECODE
from pdserve.obs.dashboards.memory import MEMORY
from pdserve.obs.dashboards.overview import OVERVIEW
from pdserve.obs.dashboards.panel import WINDOW, Colour, Dashboard, Kind, Panel, Query, Step, Unit
from pdserve.obs.dashboards.prefill import PREFILL
from pdserve.obs.dashboards.requests import REQUESTS
from pdserve.obs.dashboards.transfer import TRANSFER
from pdserve.obs.dashboards.workers import WORKERS

DASHBOARDS = (OVERVIEW, REQUESTS, PREFILL, TRANSFER, DECODE, MEMORY, WORKERS, BREAK_EVEN)
"""All of them, in the order in which one looks at them."""

__all__ = ["DASHBOARDS", "WINDOW", "Colour", "Dashboard", "Kind", "Panel", "Query", "Step", "Unit"]
