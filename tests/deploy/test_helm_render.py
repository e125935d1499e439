"""The chart is well-formed: helm lint, schemas of Kubernetes and the operators, values that are refused."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm_golden import golden, path
from tests.support.chart import CHART, EVERYTHING, EXAMPLES, helm, refused, render, template, text
from tests.support.manifests import load, name_of, only, pods, problem
from tests.support.source_tree import ROOT

RENDERS = [*((example, ()) for example in EXAMPLES), ("", ()), ("", EVERYTHING)]
VARIANTS = [
    ("tls.mode=none", "autoscaling.kind=hpa"),
    ("tls.mode=secret", "tls.secretName=mine", "ray.autoscaling=false", "networkPolicy.enabled=false"),
    ("model.hubTokenSecret=hub", "networkPolicy.modelDownloads=true", "imagePullSecrets={a,b}"),
    ("otlpEndpoint=http://otel:4317", "networkPolicy.otlp[0].podSelector.matchLabels.app=otel"),
    ("ingress.enabled=true", "ingress.host=a.example.com", "ingress.className=nginx"),
    ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=picker", "tls.mode=none"),
    ("prefill.gpus=2", "prefill.runtimeClassName=nvidia", "decode.priorityClassName=high"),
]


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_lint_has_nothing_to_say(example: str) -> None:
    values = ["--values", CHART / "examples" / f"{example}.yaml"] if example else []
    done = helm("lint", CHART, "--strict", *values)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_the_four_examples_are_there() -> None:
    assert EXAMPLES == ("cpu-demo", "many-gpu-nodes-rdma", "one-gpu-node", "secure-multi-tenant")


@pytest.mark.parametrize(("example", "settings"), [*RENDERS, *(("", variant) for variant in VARIANTS)])
def test_every_manifest_fits_its_schema(example: str, settings: tuple[str, ...]) -> None:
    manifests = render(example, *settings)
    assert [wrong for wrong in map(problem, manifests) if wrong] == []
    names = [name_of(manifest) for manifest in manifests]
    assert sorted(set(names)) == sorted(names)
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {"serving"}


def test_everything_is_rendered_when_asked_for() -> None:
    kinds = {manifest["kind"] for manifest in render("", *EVERYTHING)}
    assert kinds == {
        *(
            "RayCluster",
            "Deployment",
            "Service",
            "ConfigMap",
            "Secret",
            "ScaledObject",
            "PodDisruptionBudget",
        ),
        *("ServiceMonitor", "PodMonitor", "PrometheusRule", "NetworkPolicy", "Certificate", "Issuer"),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("prefill.cpu=4",), "additional properties 'cpu' not allowed"),
        (("engine.page_size=4096",), "maximum: got 4,096, want 1,024"),
        (("engine.pagesize=16",), "additional properties 'pagesize' not allowed"),
        (("engine.threads=4",), "additional properties 'threads' not allowed"),
        (("routerSettings.api_key=abc",), "additional properties 'api_key' not allowed"),
        (("podSecurity.runAsUser=0",), "minimum: got 0, want 1"),
        (("fullnameOverride=Demo",), "'Demo' does not match pattern"),
        (("nameOverride=a_b",), "'a_b' does not match pattern"),
        (("fullnameOverride=a.",), "'a.' does not match pattern"),
        ((r"extraLabels.pdserve\.io/component=x",), "invalid propertyName 'pdserve.io/component'"),
        ((r"extraLabels.app\.kubernetes\.io/name=x",), "invalid propertyName 'app.kub"),
        (("tls.serverName=a b",), "'a b' does not match pattern"),
        (("tls.mode=off",), "value must be one of 'cert-manager', 'secret', 'none'"),
        (("tls.mode=secret",), "tls.secretName: with tls.mode secret name the Secret"),
        (("tls.issuerRef.kind=ClusterIssuer",), "properties 'name' required, if 'kind' exists"),
        (("engine.kv_memory=48Gi",), "'48Gi' does not match pattern"),
        (("networkPolicy.dns=null",), "missing property 'dns'"),
        (("networkPolicy.kubeApiPorts=null",), "missing property 'kubeApiPorts'"),
        (("secrets.create=false",), "secrets.fleet: with secrets.create false name the Secret"),
        (("secrets.create=false", "secrets.fleet=a"), "secrets.rayToken: with secrets.create false"),
        (("prefill.extraCapabilities={SYS_ADMIN}",), "value must be one of 'IPC_LOCK'"),
        (
            ("prefill.autoscaling.minReplicas=9", "autoscaling.kind=keda"),
            "prefill.autoscaling: minReplicas is",
        ),
    ],
)
def test_values_that_can_not_work_are_refused_with_a_sentence(settings: tuple[str, ...], said: str) -> None:
    assert said in refused(*settings)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        # A rule of a network policy with no ports is one for all ports.
        ({"networkPolicy": {"kubeApiPorts": []}}, "/networkPolicy/kubeApiPorts': minItems: got 0, want 1"),
        # An autoscaler counts in thousandths, and its target may not be zero.
        ({"autoscaling": {"decodeKvUtilization": 0.0004}}, "minimum: got 0.0004, want 0.01"),
    ],
)
def test_values_of_a_file_that_can_not_work_are_refused_too(
    values: dict[str, object], said: str, tmp_path: Path
) -> None:
    assert said in of_file(values, tmp_path).stderr


def of_file(values: dict[str, object], folder: Path) -> subprocess.CompletedProcess[str]:
    """The chart with a values file, whose numbers helm reads otherwise than those of --set: as floats."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values), "utf-8")
    return helm("template", "demo", CHART, "--values", file)


def test_large_numbers_of_a_file_stay_whole(tmp_path: Path) -> None:
    user, tokens = 1_000_650_000, 2_000_000
    values = {
        "podSecurity": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user),
        "prefill": {"extraResources": {"example.com/card": tokens}},
        "engine": {"kv_memory": 100 * 2**30},
        "autoscaling": {"kind": "keda", "prefillTokensPerWorker": tokens},
    }
    done = of_file(values, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\de\+\d", done.stdout)
    manifests = load(done.stdout)
    for name, pod in pods(manifests):
        security = pod["spec"]["securityContext"]
        assert [security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [user] * 3, name
    container = dict(pods(manifests))["RayCluster/demo-pdserve/prefill"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["example.com/card"] == str(tokens)


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands in a mapping twice, as kustomize and Flux do."""


def _mapping(loader: _Strict, node: yaml.MappingNode) -> dict[object, object]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(set(keys)) == len(keys), sorted(map(str, keys))
    return loader.construct_mapping(node, deep=True)


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)


def test_labels_of_monitoring_and_of_everything_may_be_the_same() -> None:
    same = ("extraLabels.release=all", "extraLabels.grafana_dashboard=no", "monitoring.labels.release=mine")
    manifests = [m for m in yaml.load_all(text("", *EVERYTHING, *same), _Strict) if m]
    assert only(manifests, "PrometheusRule")["metadata"]["labels"]["release"] == "mine"
    assert only(manifests, "RayCluster")["metadata"]["labels"]["release"] == "all"
    dashboard = only(manifests, "ConfigMap", "-overview-dashboard")["metadata"]["labels"]
    assert (dashboard["grafana_dashboard"], dashboard["release"]) == ("1", "all")


def test_what_values_take_away_leaves_manifests_that_can_be_read() -> None:
    bare = ("monitoring.labels=null", "monitoring.dashboardLabels=null", "routerSettings=null", "engine=null")
    manifests = render("", *EVERYTHING, *bare)
    assert [wrong for wrong in map(problem, manifests) if wrong] == []
    # Kubernetes before 1.33 takes no pause of zero seconds.
    router = only(render("", "timeouts.endpointSeconds=0"), "Deployment", "-router")
    assert "lifecycle" not in router["spec"]["template"]["spec"]["containers"][0]


def test_metrics_are_on_no_service_that_may_face_the_outside() -> None:
    services = [m for m in render("", "router.service.type=LoadBalancer") if m["kind"] == "Service"]
    ports = {m["spec"].get("type", ""): [port["name"] for port in m["spec"]["ports"]] for m in services}
    assert ports == {"LoadBalancer": ["grpc", "http"], "": ["grpc", "metrics"]}


def test_copies_and_the_schema_of_settings_are_current() -> None:
    command = [sys.executable, "scripts/sync_chart.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"run scripts/sync_chart.py; it would write:\n{done.stdout}{done.stderr}"


def test_secrets_are_new_for_each_release_and_long_enough() -> None:
    seen = set()
    for release in ("a", "b"):
        for secret in (m for m in render(release=release) if m["kind"] == "Secret"):
            (value,) = secret["data"].values()
            seen.add(value)
            assert len(base64.b64decode(value)) == 64
            assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert len(seen) == 4


def test_a_changed_setting_rolls_workers_and_a_router_setting_routers() -> None:
    def marks(*settings: str) -> list[str]:
        templates = dict(pods(render("", *settings)))
        deployments = (f"Deployment/demo-pdserve-{part}" for part in ("prefill", "decode", "router"))
        return [templates[name]["metadata"]["annotations"]["pdserve.io/settings"] for name in deployments]

    usual, engine, router = marks(), marks("engine.page_size=32"), marks("routerSettings.max_queue=9")
    assert [a == b for a, b in zip(usual, engine, strict=True)] == [False, False, True]
    assert [a == b for a, b in zip(usual, router, strict=True)] == [True, True, False]
    # What both must agree on, and what follows from it, is a setting of both.
    for both in ("engine.kv_mixing=relaxed", "engine.precision=fast", "engine.lease_s=20"):
        assert [a == b for a, b in zip(usual, marks(both), strict=True)] == [False, False, False], both
    assert marks("inferencePool.enabled=true", "inferencePool.endpointPicker.name=p")[2] != usual[2]


def test_names_stay_within_kubernetes_limits() -> None:
    manifests = render(release="a.release-with-a-name-that-is-as-long-as-helm-allows")
    for manifest in manifests:
        # A pod's name is its Deployment's with 17 characters more, and a seat's fleet is named after it.
        room = 63 - 17 if manifest["kind"] == "Deployment" else 63
        assert len(manifest["metadata"]["name"]) <= room, name_of(manifest)
    # KubeRay makes names such as NAME-GROUP-worker-xxxxx and NAME-head-svc of it.
    assert len(only(manifests, "RayCluster")["metadata"]["name"]) <= 41


def test_a_name_that_kubernetes_would_refuse_is_refused_at_once() -> None:
    done = template(release="1demo")
    assert "1demo-pdserve: Services and Ray clusters have names that begin with a letter" in done.stderr
    assert render("", "fullnameOverride=demo", release="1demo")
    # Cut off between hyphens, a name does not end in one.
    cut = render("", f"fullnameOverride={'a' * 34}---b")
    assert only(cut, "RayCluster")["metadata"]["name"] == "a" * 34


def test_notes_say_what_is_not_safe() -> None:
    def notes(*settings: str) -> str:
        sets = [part for setting in settings for part in ("--set", setting)]
        done = helm("install", "demo", CHART, "--dry-run=client", *sets)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    open_notes, safe = notes("tls.mode=none"), notes("auth.apiKeysSecret=keys")
    assert "WARNING: tls.mode is none" in open_notes
    assert "WARNING: neither keys nor tokens" in open_notes
    assert "WARNING" not in safe
    assert "--tls-ca ca.crt" in safe
    assert "get secret demo-pdserve-client" in safe
    hub = ("auth.apiKeysSecret=keys", "model.name=some/model")
    assert "WARNING: some/model is of the hub" in notes(*hub)
    assert "WARNING" not in notes(*hub, "networkPolicy.modelDownloads=true")
    assert "get secret demo-pdserve-node" in notes("tls.clientCertificate=false")
    keys, outside = "auth.apiKeysSecret=keys", "router.service.type=LoadBalancer"
    for way_in in (outside, "ingress.enabled=true"):
        assert "let only pods of this namespace call routers" in notes(keys, way_in)
    assert "WARNING" not in notes(keys, outside, "networkPolicy.clients[0].ipBlock.cidr=192.0.2.0/24")
    spans = (keys, "otlpEndpoint=http://otel:4317")
    assert "WARNING: the network policies keep spans from http://otel:4317" in notes(*spans)
    assert "WARNING" not in notes(*spans, "networkPolicy.otlp[0].podSelector.matchLabels.app=otel")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_render_as_they_were_reviewed(example: str) -> None:
    """After a change that is meant: `python -m tests.deploy.helm_golden`, and look at the difference."""
    wanted = path(example).read_text("utf-8").splitlines()
    assert golden(example).splitlines() == wanted
