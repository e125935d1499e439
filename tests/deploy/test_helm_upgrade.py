"""An upgrade keeps the secrets that an installation made: helm asks a small stand-in for Kubernetes' API."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.support.chart import CHART, NAMESPACE, RELEASE, helm, render
from tests.support.manifests import load

LABELS = {"app.kubernetes.io/managed-by": "Helm"}
ANNOTATIONS = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
"""By these helm knows what it installed before."""
MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def api() -> dict[str, Any]:
    """What an API server says about itself, by path, if it knows the kinds of the chart and no others."""
    kinds = {(manifest["apiVersion"], manifest["kind"]) for manifest in render()}
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    }
    for version in sorted({version for version, _ in kinds}):
        resources = [
            {
                "kind": kind,
                "name": kind.lower() + "s",
                "singularName": "",
                "namespaced": True,
                "verbs": ["get"],
            }
            for known, kind in sorted(kinds)
            if known == version
        ]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if "/" in version:
            named = {"groupVersion": version, "version": version.partition("/")[2]}
            group = {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}
            answers["/apis"]["groups"].append(group)
    return answers


@contextmanager
def cluster(secrets: dict[str, dict[str, str]], directory: Path) -> Iterator[Path]:
    """An API server on loopback that has these Secrets (data by name) and no others. Gives a kubeconfig."""
    answers = api()
    for name, data in secrets.items():
        meta = {"name": name, "namespace": NAMESPACE, "labels": LABELS, "annotations": ANNOTATIONS}
        answers[f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}"] = {
            "apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data,
        }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or MISSING).encode()
            self.send_response(HTTPStatus.OK if answer else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        file = directory / "kubeconfig"
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        file.write_text(
            json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [context],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "u", "user": {}}],
            }), "utf-8",
        )  # fmt: skip
        try:
            yield file
        finally:
            server.shutdown()


def rendered(kubeconfig: Path) -> dict[str, dict[str, str]]:
    """The data of the chart's Secrets, rendered by helm with a cluster at hand."""
    done = helm(
        *("template", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=server"),
        *("--kubeconfig", kubeconfig, "--disable-openapi-validation", "--skip-tests"),
    )
    assert done.returncode == 0, done.stderr
    secrets = [manifest for manifest in load(done.stdout) if manifest["kind"] == "Secret"]
    return {secret["metadata"]["name"]: secret["data"] for secret in secrets}


def test_secrets_that_are_there_stay_and_missing_ones_are_made(tmp_path: Path) -> None:
    kept = base64.b64encode(b"ab" * 32).decode()
    with cluster({"demo-pdserve-fleet": {"secret": kept}}, tmp_path) as kubeconfig:
        first, second = rendered(kubeconfig), rendered(kubeconfig)
    for data in (first, second):
        assert data["demo-pdserve-fleet"] == {"secret": kept}
        assert len(base64.b64decode(data["demo-pdserve-ray-token"]["auth_token"])) == 64
    assert first["demo-pdserve-ray-token"] != second["demo-pdserve-ray-token"]
