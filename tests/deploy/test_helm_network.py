"""Who reaches whom in the rendered chart: what serving needs passes, everything else does not."""

from __future__ import annotations

import pytest

from tests.support.chart import EVERYTHING, EXAMPLES, render, template
from tests.support.manifests import Manifest, load, only, pods, problem
from tests.support.reach import Pod, may_reach

PARTS = {
    "router": "Deployment/demo-pdserve-router",
    "prefill seat": "Deployment/demo-pdserve-prefill",
    "decode seat": "Deployment/demo-pdserve-decode",
    "head": "RayCluster/demo-pdserve/head",
    "prefill worker": "RayCluster/demo-pdserve/prefill",
    "decode worker": "RayCluster/demo-pdserve/decode",
}
STRANGERS = {
    "client": Pod(labels={"app": "shop"}),
    "other namespace": Pod(namespace="elsewhere"),
    "monitoring": Pod(namespace="monitoring"),
    "names": Pod(namespace="kube-system", labels={"k8s-app": "kube-dns"}),
    "gateway": Pod(namespace="gateway"),
    "other release": Pod(labels={"pdserve.io/instance": "other", "pdserve.io/component": "router"}),
}
WORKER_PORT, RAY_PORTS = 23456, (6379, 6380, 6381, 10001, 10002, 19999)
NEEDED = [
    ("client", "router", 50051),
    ("client", "router", 8000),
    ("prefill worker", "router", 50051),
    ("decode worker", "router", 50051),
    ("router", "prefill worker", WORKER_PORT),
    ("router", "decode worker", WORKER_PORT),
    ("decode worker", "prefill worker", WORKER_PORT),
    ("prefill worker", "decode worker", WORKER_PORT),
    ("decode worker", "decode worker", WORKER_PORT),
    ("prefill seat", "head", 10001),
    ("decode seat", "head", 10001),
    *[("head", "decode worker", port) for port in RAY_PORTS],
    *[("prefill worker", "head", port) for port in RAY_PORTS],
    *[("monitoring", part, port) for part, port in (("router", 9464), ("prefill seat", 9466))],
    *[("monitoring", part, 9465) for part in ("prefill worker", "decode worker")],
]
FORBIDDEN = [
    *[("router", worker, port) for worker in ("prefill worker", "decode worker") for port in RAY_PORTS],
    *[("router", "head", port) for port in RAY_PORTS],
    *[(one, "head", port) for one in ("client", "other namespace", "monitoring") for port in RAY_PORTS],
    *[(one, "decode worker", WORKER_PORT) for one in ("client", "decode seat", "other release")],
    *[("decode seat", "head", port) for port in (6379, 6380, 8265)],
    ("decode seat", "router", 50051),
    ("decode seat", "prefill seat", 9466),
    ("decode worker", "router", 8000),
    ("client", "router", 9464),
    ("client", "decode worker", 9465),
    ("other namespace", "router", 50051),
    ("monitoring", "router", 50051),
    ("router", "other namespace", 443),
    ("decode worker", "other namespace", 443),
]


def pods_of(manifests: list[Manifest]) -> dict[str, Pod]:
    templates = dict(pods(manifests))
    return {name: Pod.of(templates[path]) for name, path in PARTS.items()} | STRANGERS


def policies_of(manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render("", *EVERYTHING)


@pytest.mark.parametrize(("source", "target", "port"), NEEDED)
def test_what_serving_needs_passes(manifests: list[Manifest], source: str, target: str, port: int) -> None:
    named = pods_of(manifests)
    assert may_reach(policies_of(manifests), named[source], named[target], port)


@pytest.mark.parametrize(("source", "target", "port"), FORBIDDEN)
def test_everything_else_does_not(manifests: list[Manifest], source: str, target: str, port: int) -> None:
    named = pods_of(manifests)
    assert not may_reach(policies_of(manifests), named[source], named[target], port)


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_nothing_is_open_by_default(example: str) -> None:
    found = render(example)
    named, policies = pods_of(found), policies_of(found)
    stranger, ports = STRANGERS["other namespace"], range(1, 65536, 911)
    reached = {part: [p for p in ports if may_reach(policies, stranger, named[part], p)] for part in PARTS}
    assert not any(reached.values()), reached


def test_only_the_gateway_reaches_routers_of_several_tenants() -> None:
    found = render("secure-multi-tenant")
    named, policies = pods_of(found), policies_of(found)
    assert may_reach(policies, named["gateway"], named["router"], 50051)
    assert not may_reach(policies, named["client"], named["router"], 50051)
    assert not may_reach(policies, named["gateway"], named["decode worker"], WORKER_PORT)


def test_helm_test_may_ask_where_only_named_clients_may() -> None:
    asks = template("secure-multi-tenant", part="tests/generate").stdout
    (pod,) = load(asks)
    (policy,) = load(template("secure-multi-tenant", part="tests/policy").stdout)
    assert problem(policy) == ""
    assert policy["metadata"]["annotations"]["helm.sh/hook"] == "test"
    found = render("secure-multi-tenant")
    named, policies = pods_of(found), policies_of(found)
    test = Pod.of(pod)
    assert not may_reach(policies, test, named["router"], 50051)
    assert may_reach([*policies, policy], test, named["router"], 50051)
    assert not may_reach([*policies, policy], named["client"], named["router"], 50051)
    assert not may_reach([*policies, policy], test, named["decode worker"], WORKER_PORT)
    # Without named clients every pod of the namespace may ask, this one among them.
    assert template(part="tests/policy").returncode != 0


def test_a_head_that_survives_reaches_its_redis_and_no_other_pod_does() -> None:
    found = render("many-gpu-nodes-rdma")
    named, policies = pods_of(found), policies_of(found)
    redis = Pod(namespace="ray-system")
    assert [part for part in PARTS if may_reach(policies, named[part], redis, 6379)] == ["head"]


def test_all_pods_may_ask_for_names_and_only_the_head_may_ask_kubernetes(manifests: list[Manifest]) -> None:
    default = only(manifests, "NetworkPolicy", "-default")["spec"]["egress"]
    (names,) = default
    assert names["to"][0]["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    assert {port["port"] for port in names["ports"]} == {53}
    anywhere = [
        policy["metadata"]["name"]
        for policy in policies_of(manifests)
        for rule in policy["spec"].get("egress", ())
        if not rule.get("to")
    ]
    assert anywhere == ["demo-pdserve-ray-head"]


def test_listeners_of_workers_take_the_ports_that_are_open_and_rays_lie_elsewhere(
    manifests: list[Manifest],
) -> None:
    templates = dict(pods(manifests))
    (rule, *_) = only(manifests, "NetworkPolicy", "-workers")["spec"]["ingress"]
    (opened,) = rule["ports"]
    wanted = {"name": "net.ipv4.ip_local_port_range", "value": f"{opened['port']} {opened['endPort']}"}
    cluster = only(manifests, "RayCluster")["spec"]
    for group in cluster["workerGroupSpecs"]:
        spec = templates[f"RayCluster/demo-pdserve/{group['groupName']}"]["spec"]
        assert spec["securityContext"]["sysctls"] == [wanted]
        fixed = {int(value) for name, value in group["rayStartParams"].items() if name.endswith("port")}
        assert not [port for port in fixed if opened["port"] <= port <= opened["endPort"]]
        first, last = (int(group["rayStartParams"][f"{end}-worker-port"]) for end in ("min", "max"))
        assert last < opened["port"]
        assert first > 10001
