"""The dashboards as data: for Grafana (`deploy/grafana`), for `pdserve dashboards`, and for tests."""

from __future__ import annotations

from pdserve.obs.dashboards.overview import OVERVIEW
from pdserve.obs.dashboards.panel import WINDOW, Colour, Dashboard, Kind, Panel, Query, Step, Unit

DASHBOARDS = (OVERVIEW,)
"""All of them, in the order in which one looks at them."""

__all__ = ["DASHBOARDS", "WINDOW", "Colour", "Dashboard", "Kind", "Panel", "Query", "Step", "Unit"]
