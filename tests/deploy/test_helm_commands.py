"""What the rendered pods run is read by pdserve's own options: flags exist, files are mounted, values fit."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdserve.cli.fleet
import pdserve.cli.router
from pdserve.cli.main import main
from pdserve.config import ServeConfig
from pdserve.types import Role
from router.config import RouterConfig
from tests.support.certs import Certs
from tests.support.chart import EVERYTHING, EXAMPLES, render, template
from tests.support.manifests import Manifest, load, only, pods, problem

FAST = ("engine.precision=fast", "tls.mode=none")
RENDERS = [*((example, ()) for example in EXAMPLES), ("", EVERYTHING), ("", FAST)]
CONTENTS = {"secret": "ab" * 32, "auth_token": "cd" * 32, "keys": "", "jwks.json": '{"keys": []}'}
"""Files of Secrets and ConfigMaps that somebody else makes, or helm at random."""
every_render = pytest.mark.parametrize(("example", "settings"), RENDERS)
Parse = Callable[[list[Manifest], str], Any]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs"), hosts=("pdserve.internal",))


def lay_out(manifests: list[Manifest], template: Manifest, certs: Certs, root: Path) -> None:
    """Writes what the container finds mounted below `root`, as the kubelet would."""
    (container,) = template["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for mount in container["volumeMounts"]:
        folder, volume = root / mount["mountPath"].lstrip("/"), volumes[mount["name"]]
        folder.mkdir(parents=True)
        maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
        name = volume.get("configMap", {}).get("name")
        for file, text in maps.get(name, CONTENTS if name else {}).items():
            (folder / file).write_text(text, "utf-8")
        for item in volume.get("secret", {}).get("items", ()):
            path = folder / item["path"]
            path.touch(mode=0o600)
            pem = {"ca.crt": "ca.crt", "tls.crt": "node.crt", "tls.key": "node.key"}.get(item["key"])
            path.write_bytes((certs.directory / pem).read_bytes() if pem else CONTENTS[item["key"]].encode())


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certs: Certs) -> Parse:
    """Gives the configuration that a Deployment's container ends up with."""

    def parsed(manifests: list[Manifest], part: str) -> Any:
        template = dict(pods(manifests))[f"Deployment/demo-pdserve-{part}"]
        root = tmp_path / part
        lay_out(manifests, template, certs, root)
        (container,) = template["spec"]["containers"]
        assert not [variable for variable in container["env"] if variable["name"].startswith("PDSERVE_")]
        words = [*container["command"], *container["args"]]
        argv = [
            word.replace("$(POD_NAME)", f"demo-pdserve-{part}-6b9f7c-x2x4z").replace("/etc/", f"{root}/etc/")
            for word in words
        ]
        seen: list[Any] = []

        def run(config: object, *_: object) -> int:
            seen.append(config)
            return 0

        monkeypatch.setattr(pdserve.cli.fleet, "run", run)
        monkeypatch.setattr(pdserve.cli.router, "run", run)
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), part
        return seen[0]

    return parsed


@every_render
def test_routers_and_seats_understand_their_arguments_and_agree(
    example: str, settings: tuple[str, ...], parse: Parse
) -> None:
    manifests = render(example, *settings)
    router: RouterConfig = parse(manifests, "router")
    assert router.secret_bytes({}) == bytes.fromhex(CONTENTS["secret"])
    services = [only(manifests, "Service", part) for part in ("-router", "-routers")]
    open_ports = [{port["port"] for port in service["spec"]["ports"]} for service in services]
    assert open_ports == [{router.port, router.http_port}, {router.port, router.metrics_port}]
    for role in (Role.PREFILL, Role.DECODE):
        seat: ServeConfig = parse(manifests, str(role))
        assert seat.wanted() == {role: 1}
        assert seat.exclusive_nodes
        assert seat.fleet_name.startswith(f"demo-pdserve-{role}-")
        for name in ("kv_mixing", "lease_s", "local_prefill_threshold", "insecure", "tls_server_name"):
            assert getattr(seat, name) == getattr(router, name), name
        assert (seat.log_format, seat.otlp_endpoint) == (router.log_format, router.otlp_endpoint)
        worker = seat.worker(role, secret="", routers=seat.routers, run_dir="")
        group = next(
            g for g in only(manifests, "RayCluster")["spec"]["workerGroupSpecs"] if g["groupName"] == role
        )
        (container,) = group["template"]["spec"]["containers"]
        assert worker.threads == int(container["resources"]["limits"]["cpu"])
        assert worker.metrics_port in {port["containerPort"] for port in container["ports"]}
        # A worker reads its certificate on its own node, at the path that its seat names.
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert bool(worker.tls_cert) == ("/etc/pdserve/tls" in mounted)
        assert worker.tls_cert.endswith("/etc/pdserve/tls/tls.crt") or not worker.tls_cert


@every_render
def test_addresses_are_those_of_services_that_are_there(
    example: str, settings: tuple[str, ...], parse: Parse
) -> None:
    manifests = render(example, *settings)
    seat: ServeConfig = parse(manifests, "decode")
    cluster = only(manifests, "RayCluster")["metadata"]["name"]
    # KubeRay makes this one for the head.
    assert seat.ray_address == f"ray://{cluster}-head-svc.serving.svc:10001"
    headless = only(manifests, "Service", "-routers")
    assert seat.routers == (f"dns+{headless['metadata']['name']}.serving.svc:50051",)
    assert headless["spec"]["clusterIP"] == "None"
    # Routers are ready once workers have joined, so workers must find those that are not.
    assert headless["spec"]["publishNotReadyAddresses"] is True


def test_settings_of_values_arrive_as_they_are(parse: Parse) -> None:
    manifests = render(
        "",
        *(
            "engine.page_size=32",
            "engine.kv_memory=3GiB",
            "engine.lease_s=7",
            "engine.prefix_caching=false",
        ),
        *("routerSettings.max_queue=77", "routerSettings.protocols={oip,vllm}", "prefill.cpus=6"),
        *("routerSettings.max_queue_tokens=40000000", "model.servedNames={a,b}"),
    )
    seat, router = parse(manifests, "prefill"), parse(manifests, "router")
    assert (seat.page_size, seat.kv_memory, seat.lease_s) == (32, 3 * 2**30, 7)
    assert (seat.prefix_caching, seat.threads) == (False, 6)
    assert (router.max_queue, router.max_queue_tokens, router.lease_s) == (77, 40_000_000, 7)
    assert (router.protocols, router.served_model_name) == (("oip", "vllm"), ("a", "b"))


def test_secrets_made_by_the_chart_are_fleet_secrets() -> None:
    (value,) = only(render(), "Secret", "-fleet")["data"].values()
    config = RouterConfig(fleet_secret=base64.b64decode(value).decode())
    assert len(config.secret_bytes({})) == 32


@every_render
def test_a_ray_pod_drains_by_a_command_that_exists(
    example: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pdserve.cli.drain

    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(pdserve.cli.drain, "run", lambda *values: asked.append(values) or 0)
    for name, pod in pods(render(example, *settings)):
        if name.endswith(("/prefill", "/decode")):
            (container,) = pod["spec"]["containers"]
            monkeypatch.setattr(sys, "argv", container["lifecycle"]["preStop"]["exec"]["command"])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code in (0, None)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("example", "settings", "secret"),
    [
        ("", (), "demo-pdserve-client"),
        ("secure-multi-tenant", ("auth.testKeySecret=a-key",), "demo-pdserve-node"),
        ("cpu-demo", (), ""),
    ],
)
def test_helm_test_asks_as_a_client_does(
    example: str, settings: tuple[str, ...], secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pdserve.cli.generate

    done = template(example, *settings, part="tests/generate")
    (manifest,) = load(done.stdout)
    assert problem(manifest) == ""
    assert manifest["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = manifest["spec"]["containers"]
    asked: list[Any] = []
    monkeypatch.setattr(pdserve.cli.generate, "run_one", lambda *values, **_: asked.append(values) or 0)
    monkeypatch.setattr(sys, "argv", [*container["command"], *container["args"]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    ((prompt, router, options),) = asked
    assert (prompt, options) == ("The capital of France is", {"max_tokens": 8})
    assert "demo-pdserve-router:50051" in repr(router)
    assert ("/etc/pdserve/tls/tls.crt" in repr(router)) is bool(secret)
    secrets = [v["secret"]["secretName"] for v in manifest["spec"]["volumes"] if "secret" in v]
    assert secrets == ([secret] if secret else [])
