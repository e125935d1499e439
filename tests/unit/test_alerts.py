"""Recording rules and alerts: valid, on series that exist, with unit tests that can fail; runbooks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.obs.dashboards import DASHBOARDS
from pdserve.obs.dashboards.groups import FAILED
from tests.support.promql import Selector, faults, selectors
from tests.support.source_tree import ROOT
from tests.support.tools import tool

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = [
    rule
    for path in sorted((PROMETHEUS / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
UNIT_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
RUNBOOKS = ROOT / "docs" / "operate.md"


def _promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, timeout=60)


def _runbooks() -> dict[str, str]:
    """What stands below each heading that is an alert's name."""
    text = RUNBOOKS.read_text("utf-8")
    return dict(re.findall(r"^#+ (Pdserve\w+)\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL))


def _cases(alert: str) -> list[list[Any]]:
    """What each unit test of an alert expects."""
    return [
        check["exp_alerts"]
        for path in UNIT_TESTS
        for case in yaml.safe_load(path.read_text())["tests"]
        for check in case["alert_rule_test"]
        if check["alertname"] == alert
    ]


def test_groups_of_rules_have_names_of_their_own() -> None:
    names = [
        group["name"]
        for path in (PROMETHEUS / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert len(set(names)) == len(names)


def test_the_configuration_and_all_rules_are_valid() -> None:
    done = _promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = _promtool("check", "rules", "--lint=all", "--lint-fatal", *(PROMETHEUS / "rules").glob("*.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_tests_of_the_rules_pass() -> None:
    done = _promtool("test", "rules", *UNIT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_tested_both_ways(alert: str) -> None:
    expected = _cases(alert)
    assert any(expected), "there is a case in which it fires"
    assert not all(expected), "there is a case in which it does not"


@pytest.mark.parametrize("defect", ["vector(1)", "vector(1) < 0"], ids=["always", "never"])
def test_the_unit_tests_notice_every_broken_alert(defect: str, tmp_path: Path) -> None:
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    path = tmp_path / "prometheus" / "rules" / "alerts.yml"
    document = yaml.safe_load(path.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = defect
    path.write_text(yaml.safe_dump(document))
    done = _promtool("test", "rules", *(tmp_path / "prometheus" / "tests").glob("*.yml"))
    assert done.returncode != 0
    assert set(re.findall(r"^ +alertname: (\w+), time", done.stderr, re.MULTILINE)) == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert alert.startswith("Pdserve")
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/operate.md#{alert.lower()}"
    assert len(_runbooks()[alert].split()) >= 30, "a runbook is more than a heading"


def test_every_runbook_belongs_to_an_alert() -> None:
    assert sorted(_runbooks()) == sorted(ALERTS)


def test_links_of_the_runbooks_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", RUNBOOKS.read_text("utf-8"))
    assert len(links) > 20
    for file, anchor in links:
        target = RUNBOOKS.parent / file if file else RUNBOOKS
        assert target.exists(), file
        titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, f"{file}#{anchor}"


def test_rules_and_dashboards_ask_for_series_that_exist() -> None:
    exprs = [rule["expr"] for rule in RULES]
    exprs += [q.promql() for board in DASHBOARDS for panel in board.panels for q in panel.queries]
    asked = [selector for expr in exprs for selector in selectors(expr)]
    assert len(asked) > 100
    assert [fault for selector in asked for fault in faults(selector)] == []


@pytest.mark.parametrize(
    "selector",
    [
        Selector("pdserve_nothing_total", ()),
        Selector("pdserve_ttft_seconds", ()),
        Selector("pdserve_ttft_seconds_total", ()),
        Selector("pdserve_queued_requests_sum", ()),
        Selector("pdserve_workers", (("colour", "=", "red"),)),
        Selector("pdserve_workers", (("state", "=~", "ready|asleep"),)),
    ],
)
def test_what_does_not_exist_is_noticed(selector: Selector) -> None:
    assert len(faults(selector)) == 1


def test_recorded_series_that_rules_ask_for_are_recorded() -> None:
    asked = {name for rule in RULES for name in re.findall(r"\bpdserve:[\w:]+", rule["expr"])}
    assert asked
    assert asked <= RECORDED.keys()


def test_a_failed_request_is_the_same_in_alerts_and_dashboards() -> None:
    assert f'outcome=~"{FAILED}"' in RECORDED["pdserve:failed_requests:ratio_rate5m"]
