"""What the rendered autoscalers ask and do, and the dashboards and rules that the chart brings along."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.obs.catalogue import BY_NAME
from tests.support.chart import EVERYTHING, render
from tests.support.manifests import Manifest, only
from tests.support.source_tree import ROOT
from tests.support.tools import tool

_SELECTOR = re.compile(r"(pdserve_\w+)\{([^}]*)\}")
FROM_PROMETHEUS = {"namespace", "service"}
"""Labels that the ServiceMonitor's targets have, beside the metrics' own."""


def scaled(role: str, *settings: str) -> Manifest:
    found: Manifest = only(render("", *EVERYTHING, *settings), "ScaledObject", f"-{role}")["spec"]
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_queries_name_metrics_and_labels_that_exist(role: str, tmp_path: Path) -> None:
    (trigger,) = scaled(role)["triggers"]
    query = trigger["metadata"]["query"]
    asked = _SELECTOR.findall(query)
    assert asked
    for name, labels in asked:
        values = {label.name: label.values for label in BY_NAME[name].labels}
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            assert label in FROM_PROMETHEUS or value in values[label], (name, label)
    rules = {"groups": [{"name": "scaling", "rules": [{"record": "asked", "expr": query}]}]}
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rules), "utf-8")
    command = [tool("promtool"), "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_queries_ask_only_about_this_release(role: str) -> None:
    (trigger,) = scaled(role)["triggers"]
    for _, labels in _SELECTOR.findall(trigger["metadata"]["query"]):
        assert 'namespace="serving"' in labels
        assert 'service="demo-pdserve-routers"' in labels


def evaluated(query: str, values: dict[str, float]) -> float:
    """A product of `max(name{…})` terms, with these values by name."""
    result = 1.0
    for name in re.findall(r"max\((\w+)", query):
        result *= values[name]
    return result


@pytest.mark.parametrize(
    ("role", "values", "replicas"),
    [
        ("prefill", {"pdserve_outstanding_prefill_tokens": 0}, 0),
        ("prefill", {"pdserve_outstanding_prefill_tokens": 16384}, 1),
        ("prefill", {"pdserve_outstanding_prefill_tokens": 50_000}, 4),
        # 3 workers, 93 % full: pages of 2.79 workers are in use, at 70 % each these are 4.
        ("decode", {"pdserve_kv_utilization_ratio": 0.93, "pdserve_workers": 3}, 4),
        ("decode", {"pdserve_kv_utilization_ratio": 0.2, "pdserve_workers": 5}, 2),
    ],
)
def test_the_load_says_how_many_workers(role: str, values: dict[str, float], replicas: int) -> None:
    (trigger,) = scaled(role)["triggers"]
    assert trigger["metricType"] == "AverageValue"
    wanted = evaluated(trigger["metadata"]["query"], values) / float(trigger["metadata"]["threshold"])
    assert -int(-wanted // 1) == replicas


def test_nothing_is_scaled_down_in_haste_or_for_lack_of_a_prometheus() -> None:
    spec = scaled("decode", "decode.autoscaling.minReplicas=2")
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= 300
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert spec["fallback"]["replicas"] == spec["minReplicaCount"] == 2
    assert spec["triggers"][0]["metadata"]["ignoreNullValues"] == "false"


def test_what_is_scaled_has_no_replicas_of_its_own_and_nodes_enough() -> None:
    manifests = render("many-gpu-nodes-rdma")
    for role in ("prefill", "decode"):
        spec = only(manifests, "ScaledObject", f"-{role}")["spec"]
        target = only(manifests, "Deployment", f"-{role}")
        assert spec["scaleTargetRef"] == {
            "apiVersion": "apps/v1", "kind": "Deployment", "name": target["metadata"]["name"],
        }  # fmt: skip
        assert "replicas" not in target["spec"]
        groups = {g["groupName"]: g for g in only(manifests, "RayCluster")["spec"]["workerGroupSpecs"]}
        assert groups[role]["maxReplicas"] >= spec["maxReplicaCount"]
        assert groups[role]["minReplicas"] == spec["minReplicaCount"]


def test_a_plain_autoscaler_reads_the_same_metrics() -> None:
    manifests = render("", "autoscaling.kind=hpa")
    asked = {}
    for role in ("prefill", "decode"):
        spec = only(manifests, "HorizontalPodAutoscaler", f"-{role}")["spec"]
        (metric,) = spec["metrics"]
        name = metric["external"]["metric"]["name"]
        assert name in BY_NAME
        asked[name] = metric["external"]["target"]
    assert asked == {
        "pdserve_outstanding_prefill_tokens": {"type": "AverageValue", "averageValue": "16384"},
        "pdserve_kv_utilization_ratio": {"type": "Value", "value": "700m"},
    }


def test_dashboards_and_rules_are_those_of_the_repository() -> None:
    manifests = render("", *EVERYTHING)
    shown: dict[str, Any] = {}
    for manifest in manifests:
        if manifest["metadata"]["labels"].get("grafana_dashboard") == "1":
            shown |= {name: json.loads(text) for name, text in manifest["data"].items()}
    folder = ROOT / "deploy" / "grafana" / "dashboards"
    assert shown == {path.name: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    assert len(shown) >= 8
    groups = only(manifests, "PrometheusRule")["spec"]["groups"]
    files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
    assert groups == [g for file in files for g in yaml.safe_load(file.read_text("utf-8"))["groups"]]
