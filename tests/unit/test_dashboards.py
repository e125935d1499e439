"""Dashboards as data and as Grafana's files: complete, current, and in a PromQL that Prometheus reads."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanasDashboard

from pdserve.obs.catalogue.router import OUTCOMES
from pdserve.obs.dashboards import DASHBOARDS, Dashboard, Panel, Query
from pdserve.obs.dashboards.grafana import COLUMNS, document, of_one_fleet
from pdserve.obs.dashboards.groups import OUTCOME_GROUPS
from tests.support.source_tree import ROOT
from tests.support.tools import tool

PANELS = [(board, panel) for board in DASHBOARDS for panel in board.panels]
QUERIES = [asked for _, panel in PANELS for asked in panel.queries]
NAMES = [f"{board.uid}: {panel.title}" for board, panel in PANELS]


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=NAMES)
def test_a_panel_says_what_it_shows(board: Dashboard, panel: Panel) -> None:
    assert panel.unit
    assert panel.title[0].isupper()
    assert len(panel.description) > 30
    assert panel.description.endswith(".")
    assert panel.queries
    legends = [asked.legend for asked in panel.queries]
    assert all(legends)
    assert len(set(legends)) == len(legends)


def test_names_of_pages_and_panels_are_their_own() -> None:
    assert len({board.uid for board in DASHBOARDS}) == len(DASHBOARDS)
    assert len(set(NAMES)) == len(NAMES)


def test_the_eight_pages_are_there() -> None:
    assert {board.uid.removeprefix("pdserve-") for board in DASHBOARDS} == {
        *("overview", "requests", "prefill", "transfer", "decode", "memory", "workers", "break-even"),
    }


def test_every_query_is_promql_and_so_is_its_form_for_one_fleet(tmp_path: Path) -> None:
    exprs = [form for asked in QUERIES for form in (asked.promql(), of_one_fleet(asked.promql("5m")))]
    rules = [{"record": f"test:query:{n}", "expr": expr} for n, expr in enumerate(exprs)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "test", "rules": rules}]}))
    done = subprocess.run([tool("promtool"), "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asked", QUERIES, ids=lambda asked: asked.expr)
def test_a_legend_names_labels_that_the_query_keeps(asked: Query) -> None:
    """Aggregation keeps those of `by`, arithmetic between vectors those of `on`."""
    named = set(re.findall(r"{{(\w+)}}", asked.legend))
    for kept in re.findall(r"\bby \(([^)]*)\)|[-+*/] on \(([^)]*)\)", asked.expr):
        if asked.expr.startswith(("sum", "max", "avg", "count", "histogram")):
            assert named <= set(re.split(r",\s*", kept[0] or kept[1]))


def test_no_query_makes_up_data() -> None:
    assert [asked.expr for asked in QUERIES if re.search(r"vector\(|absent", asked.expr)] == []


@pytest.mark.parametrize(
    ("expr", "narrowed"),
    [
        ("pdserve_ready", 'pdserve_ready{namespace=~"$namespace"}'),
        ('rate(pdserve_x_total{a="b"}[5m])', 'rate(pdserve_x_total{namespace=~"$namespace",a="b"}[5m])'),
        ("count by (job) (up)", 'count by (job) (up{namespace=~"$namespace"})'),
        ("max by (role) (1)", "max by (role) (1)"),
    ],
)
def test_each_selector_is_narrowed_to_the_chosen_fleet(expr: str, narrowed: str) -> None:
    assert of_one_fleet(expr) == narrowed


def test_no_selector_of_any_panel_is_left_wide() -> None:
    for asked in QUERIES:
        selectors = len(re.findall(r"\b(?:pdserve_\w+|process_\w+|up)\b", asked.expr))
        assert selectors > 0
        assert of_one_fleet(asked.expr).count("$namespace") == selectors


def test_a_window_takes_the_place_of_grafanas() -> None:
    assert Query(expr="rate(x[$__rate_interval])", legend="x").promql("30s") == "rate(x[30s])"


def test_every_outcome_belongs_to_one_group() -> None:
    named = [outcome for values in OUTCOME_GROUPS.values() for outcome in values.split("|")]
    assert sorted(named) == sorted(OUTCOMES)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_grafanas_own_model_knows_every_field_we_write(board: Dashboard) -> None:
    register_default_plugins()
    written = json.loads(json.dumps(document(board)))
    read = json.loads(json.dumps(GrafanasDashboard.from_json(written), cls=JSONEncoder))
    assert list(_lost(written, read)) == []


def test_a_field_that_grafana_does_not_know_is_noticed() -> None:
    register_default_plugins()
    written = json.loads(json.dumps(document(DASHBOARDS[0])))
    written["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
    read = json.loads(json.dumps(GrafanasDashboard.from_json(written), cls=JSONEncoder))
    assert list(_lost(written, read)) == [".panels.0.fieldConfig.defaults.unitt"]


def _lost(written: Any, read: Any, where: str = "") -> Iterator[str]:
    """Where what was read is not what was written; fields with defaults may have come in addition."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from _lost(value, read.get(key), f"{where}.{key}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, (value, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(value, other, f"{where}.{index}")
    elif written != read:
        yield where


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_panels_lie_side_by_side(board: Dashboard) -> None:
    places = [panel["gridPos"] for panel in document(board)["panels"]]
    assert all(place["x"] + place["w"] <= COLUMNS for place in places)
    for one, other in itertools.combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_the_committed_files_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_dashboards.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
