"""Dashboards as Grafana's JSON. Here: layout, units, the choice of a data source; no query."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pdserve.obs.dashboards.panel import Colour, Dashboard, Kind, Panel, Unit

SCHEMA_VERSION = 39
"""Of Grafana 11; later versions read it too."""
COLUMNS = 24
_HEIGHTS = {Kind.STAT: 5, Kind.LINES: 8, Kind.STACKED: 8, Kind.HEATMAP: 8}
_TYPES = {
    Kind.LINES: "timeseries",
    Kind.STACKED: "timeseries",
    Kind.STAT: "stat",
    Kind.HEATMAP: "heatmap",
}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(r"\b((?:pdserve|process)_\w+|up)\b(\{)?")
_FLEET = 'namespace=~"$namespace"'


def file_text(dashboard: Dashboard) -> str:
    """The file that Grafana reads for a dashboard."""
    return json.dumps(document(dashboard), indent=2, ensure_ascii=False) + "\n"


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's model of a dashboard."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["pdserve"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": [_others()],
        "templating": {"list": [_source_variable(), _fleet_variable()]},
        "panels": list(_panels(dashboard)),
    }


def of_one_fleet(expr: str) -> str:
    """The query for the fleet that is chosen above the panels: each selector with the namespace's matcher."""

    def narrowed(found: re.Match[str]) -> str:
        name, has_matchers = found.groups()
        return f"{name}{{{_FLEET}," if has_matchers else f"{name}{{{_FLEET}}}"

    return _METRIC.sub(narrowed, expr)


def _others() -> dict[str, Any]:
    """The menu of our other dashboards, which keeps the time and the fleet."""
    return {
        "type": "dashboards",
        "title": "pdserve",
        "tags": ["pdserve"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _fleet_variable() -> dict[str, Any]:
    """Which namespace. Where targets have no such label, its only value is empty, which matches them."""
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(pdserve_build_info, namespace)", "refId": "namespace"},
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Panels from left to right, a new row where one does not fit."""
    x = y = row_height = 0
    for number, panel in enumerate(dashboard.panels, start=1):
        height = _HEIGHTS[panel.kind]
        if x + panel.width > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        yield _panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height})
        x, row_height = x + panel.width, max(row_height, height)


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": _TYPES[panel.kind],
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": of_one_fleet(asked.expr),
                "legendFormat": asked.legend,
                "format": "heatmap" if panel.kind is Kind.HEATMAP else "time_series",
                "range": True,
            }
            for index, asked in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"value": None, "color": Colour.GOOD}]
    steps += [{"value": step.value, "color": step.colour} for step in panel.steps]
    fields: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.steps else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.unit is Unit.RATIO and panel.kind is not Kind.HEATMAP:
        fields["min"] = 0
    if panel.kind in (Kind.LINES, Kind.STACKED):
        stacked = panel.kind is Kind.STACKED
        fields["custom"] = {
            "fillOpacity": 30 if stacked else 0,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }
    return fields


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind is Kind.STAT:
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "auto",
        }
    if panel.kind is Kind.HEATMAP:
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit},
            "color": {"mode": "scheme", "scheme": "Blues"},
        }
    return {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
