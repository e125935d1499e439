"""What every pod of the rendered chart keeps to: security, probes, files, time to drain, what fits what."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, EVERYTHING, EXAMPLES, render
from tests.support.manifests import Manifest, name_of, only, pods, selects
from tests.support.source_tree import ROOT

RENDERS = [*((example, ()) for example in EXAMPLES), ("", EVERYTHING)]
EXTERNAL = {"pdserve-keys", "pdserve-fleet", "pdserve-ray-token", "login-example-com-jwks"}
"""Secrets and ConfigMaps that examples expect to find."""
every_render = pytest.mark.parametrize(("example", "settings"), RENDERS)


def containers(template: Manifest) -> list[Manifest]:
    found: list[Manifest] = template["spec"]["containers"]
    return found


@every_render
def test_pods_keep_to_the_restricted_standard(example: str, settings: tuple[str, ...]) -> None:
    for name, template in pods(render(example, *settings)):
        spec = template["spec"]
        own = spec["securityContext"]
        assert own["runAsNonRoot"], name
        assert own["runAsUser"] > 0, name
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name
        for container in containers(template):
            security = copy.deepcopy(container["securityContext"])
            added = security["capabilities"].pop("add", [])
            assert security == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            # Registered memory of RDMA must not move; that example is the one that can't be restricted.
            assert added == (["IPC_LOCK"] if "rdma" in example and _is_worker(name) else []), name


def _is_worker(name: str) -> bool:
    return name.startswith("RayCluster/") and not name.endswith("/head")


@every_render
def test_no_pod_gets_what_it_does_not_need(example: str, settings: tuple[str, ...]) -> None:
    manifests = render(example, *settings)
    scales_nodes = only(manifests, "RayCluster")["spec"].get("enableInTreeAutoscaling", False)
    for name, template in pods(manifests):
        spec = template["spec"]
        asks_kubernetes = scales_nodes and name.endswith("/head")
        assert spec.get("automountServiceAccountToken", True) is asks_kubernetes, name
        # A Service pdserve-router would set PDSERVE_ROUTER_PORT in every pod, which is a setting of ours.
        assert spec["enableServiceLinks"] is False, name
        for container in containers(template):
            assert "memory" in container["resources"]["limits"], name
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name


@every_render
def test_secrets_are_files_and_never_variables(example: str, settings: tuple[str, ...]) -> None:
    manifests = render(example, *settings)
    made = {m["metadata"]["name"] for m in manifests if m["kind"] in ("Secret", "ConfigMap")}
    made |= {m["spec"]["secretName"] for m in manifests if m["kind"] == "Certificate"} | EXTERNAL
    for name, template in pods(manifests):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for volume in volumes.values():
            if secret := volume.get("secret"):
                assert secret["defaultMode"] == 0o440, name
                assert secret["secretName"] in made, name
            if config := volume.get("configMap"):
                assert config["name"] in made, name
        mounts = [mount for c in containers(template) for mount in c["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes.keys(), name
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts), name
        for mount in mounts:
            assert mount.get("readOnly", False) is ("emptyDir" not in volumes[mount["name"]]), (name, mount)
        for variable in (variable for c in containers(template) for variable in c.get("env", ())):
            assert "secretKeyRef" not in variable.get("valueFrom", {}), (name, variable)


@every_render
def test_every_container_is_probed_and_has_time_to_drain(example: str, settings: tuple[str, ...]) -> None:
    for name, template in pods(render(example, *settings)):
        spec = template["spec"]
        for container in containers(template):
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container[kind]
                port = (probe.get("grpc") or probe["httpGet"])["port"]
                assert port in {*ports, *ports.values()}, (name, kind)
            drains = [int(found) for found in re.findall(r"(?:drain-)?timeout-s=(\d+)", _words(container))]
            pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert spec["terminationGracePeriodSeconds"] >= max(drains, default=0) + pause + 30, name
            assert drains or name.endswith("/head"), name


def _words(container: Manifest) -> str:
    stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    words = [*container.get("args", []), *stop]
    return " ".join(word for word in words if "start-timeout" not in word)


@every_render
def test_every_selector_finds_its_pods_and_no_others(example: str, settings: tuple[str, ...]) -> None:
    manifests = render(example, *settings)
    templates = dict(pods(manifests))
    labels = {name: template["metadata"]["labels"] for name, template in templates.items()}
    seen: list[str] = []
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if not selector or manifest["kind"] == "ServiceMonitor":
            continue
        exact = selector if manifest["kind"] != "Service" else {"matchLabels": selector}
        found = [name for name in labels if selects(exact, labels[name])]
        assert found, name_of(manifest)
        if manifest["kind"] == "Deployment":
            assert found == [name_of(manifest)]
            seen += found
        if manifest["kind"] == "PodDisruptionBudget":
            assert len(found) == 1, name_of(manifest)
    assert len(seen) == 3


def test_monitors_find_every_process_once() -> None:
    manifests = render("", *EVERYTHING)
    services = [m for m in manifests if m["kind"] == "Service"]
    selector = only(manifests, "ServiceMonitor")["spec"]["selector"]
    assert [m["metadata"]["name"] for m in services if selects(selector, m["metadata"]["labels"])] == [
        "demo-pdserve-routers"
    ]
    watched = [
        name
        for monitor in (m for m in manifests if m["kind"] == "PodMonitor")
        for name, template in pods(manifests)
        if selects(monitor["spec"]["selector"], template["metadata"]["labels"])
    ]
    assert sorted(watched) == [
        *("Deployment/demo-pdserve-decode", "Deployment/demo-pdserve-prefill"),
        *("RayCluster/demo-pdserve/decode", "RayCluster/demo-pdserve/prefill"),
    ]


def test_budgets_of_ray_pods_are_numbers_and_leave_one_worker_that_may_go() -> None:
    def budgets(*settings: str) -> dict[str, Any]:
        found = [m for m in render("", *settings) if m["kind"] == "PodDisruptionBudget"]
        return {m["metadata"]["name"].removeprefix("demo-pdserve-"): m["spec"] for m in found}

    one, three = budgets(), budgets("prefill.replicas=3")
    # A budget over a single worker would keep its node from ever being drained.
    assert sorted(one) == ["decode", "prefill", "router"]
    assert sorted(three) == ["decode", "prefill", "ray-prefill", "router"]
    assert three["ray-prefill"]["minAvailable"] == 2
    assert "maxUnavailable" not in three["ray-prefill"]
    assert {three[name]["maxUnavailable"] for name in ("decode", "prefill", "router")} == {1}


@pytest.mark.parametrize(
    ("settings", "surge", "nodes"),
    [
        ((), 1, (1, 5)),
        (("prefill.replicas=3",), 0, (3, 4)),
        (("prefill.replicas=6",), 0, (6, 6)),
        (("prefill.rollout=surge", "prefill.replicas=3"), 1, (3, 5)),
        (("prefill.rollout=in-place",), 0, (1, 4)),
        (("autoscaling.kind=keda", "prefill.autoscaling.maxReplicas=7"), 1, (1, 8)),
        # Without Ray's autoscaler all nodes that can be needed are there from the start.
        (("ray.autoscaling=false",), 0, (1, 1)),
        (("ray.autoscaling=false", "prefill.rollout=surge"), 1, (2, 2)),
        (("ray.autoscaling=false", "autoscaling.kind=keda"), 0, (4, 4)),
    ],
)
def test_a_rollout_that_starts_the_new_worker_first_has_a_spare_node(
    settings: tuple[str, ...], surge: int, nodes: tuple[int, int]
) -> None:
    manifests = render("", *settings)
    rolling = only(manifests, "Deployment", "-prefill")["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": surge, "maxUnavailable": 1 - surge}
    group = only(manifests, "RayCluster")["spec"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == nodes
    assert group["replicas"] == group["minReplicas"]


READ = """
import json, sys
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
json.dump(_derive_autoscaling_config_from_ray_cr(json.load(sys.stdin)), sys.stdout)
"""


@every_render
def test_rays_own_autoscaler_reads_the_groups_as_they_are_meant(
    example: str, settings: tuple[str, ...]
) -> None:
    cluster = only(render(example, *settings), "RayCluster")
    # In a process of its own: Ray keeps the settings it finds when it is imported, for all later tests.
    told = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(cluster), capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    read = json.loads(told.stdout)
    kinds = read["available_node_types"]
    for role in ("prefill", "decode"):
        assert kinds[role]["resources"][f"pdserve_{role}"] == 1
        assert kinds[role]["min_workers"] >= 1
    head = kinds[read["head_node_type"]]
    assert head["resources"]["pdserve_control"] == 1
    assert head["resources"]["CPU"] == 0
    options = cluster["spec"]["authOptions"]
    assert options["mode"] == "token"


def test_ray_knows_every_option_it_is_started_with() -> None:
    ray = Path(sys.executable).with_name("ray")
    told = subprocess.run([ray, "start", "--help"], capture_output=True, text=True, timeout=60, check=True)
    for example, settings in RENDERS:
        spec = only(render(example, *settings), "RayCluster")["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            wanted = {f"--{name}" for name in group["rayStartParams"]}
            assert wanted <= set(re.findall(r"--[a-z-]+", told.stdout))


def test_ray_is_of_the_version_that_is_pinned() -> None:
    """Nodes and seats run one image, and KubeRay is told what is in it."""
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    version = only(render(), "RayCluster")["spec"]["rayVersion"]
    assert f"\nray=={version}\n" in pinned
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
