"""Kubernetes manifests in tests: reading them, judging them by schemas without a cluster, finding their pods.

Kubernetes' own kinds are judged by kubernetes-validate, custom resources by the definitions in tests/data/k8s
(cert-manager's by a schema of ours of the fields we use). What is not here: what a good manifest says.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.support.source_tree import ROOT

DATA = ROOT / "tests" / "data" / "k8s"
KUBERNETES = "1.35"
Manifest = dict[str, Any]
_CORE_GROUPS = ("apps", "policy", "autoscaling", "batch", "networking.k8s.io", "rbac.authorization.k8s.io")


def load(text: str) -> list[Manifest]:
    """All documents of a stream, without empty ones."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def name_of(manifest: Manifest) -> str:
    """Such as "Deployment/demo-router"."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def only(manifests: Iterable[Manifest], kind: str, name: str = "") -> Manifest:
    """The one of this kind whose name ends so. Raises AssertionError if there are none or several."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(name)]
    assert len(found) == 1, f"{len(found)} of {kind}/…{name}"
    return found[0]


def problem(manifest: Manifest) -> str:
    """What is wrong with a manifest by its schema, unknown fields included; empty if nothing is."""
    version, kind = manifest["apiVersion"], manifest["kind"]
    group = version.rpartition("/")[0]
    try:
        if not group or group in _CORE_GROUPS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        else:
            _validator(f"{version}/{kind}").validate(manifest)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
        where = ".".join(str(part) for part in error.path)
        return f"{name_of(manifest)}: {where}: {error.message[:300]}"
    return ""


@cache
def _validator(key: str) -> Any:
    schemas = _custom_schemas()
    assert key in schemas, f"no schema of {key} in tests/data/k8s"
    return jsonschema.Draft7Validator(schemas[key])


@cache
def _custom_schemas() -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = json.loads((DATA / "cert-manager.json").read_text("utf-8"))
    for path in sorted(DATA.glob("*.yaml.gz")):
        spec = yaml.load(gzip.decompress(path.read_bytes()), yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = _closed(copy.deepcopy(version["schema"]["openAPIV3Schema"]))
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema
    return schemas


def _closed(schema: Any) -> Any:
    """A schema as the API server reads it, and strict: it would drop fields that it does not know."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(value) for key, value in schema.items()}
    if isinstance(result.get("pattern"), str):
        # Go takes flags in the middle, Python at the start alone.
        flagged = result["pattern"].startswith("^(?i)")
        result["pattern"] = "(?i)^" + result["pattern"][5:] if flagged else result["pattern"]
    if result.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    open_ended = "additionalProperties" in result or result.get("x-kubernetes-preserve-unknown-fields")
    if result.get("type") == "object" and "properties" in result and not open_ended:
        result["additionalProperties"] = False
    return result


def pods(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(name, template) of every pod that these manifests make, Ray's among them."""
    for manifest in manifests:
        name = name_of(manifest)
        if manifest["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield name, manifest["spec"]["template"]
        elif manifest["kind"] == "Pod":
            yield name, manifest
        elif manifest["kind"] == "RayCluster":
            yield f"{name}/head", manifest["spec"]["headGroupSpec"]["template"]
            for group in manifest["spec"]["workerGroupSpecs"]:
                yield f"{name}/{group['groupName']}", group["template"]


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector (matchLabels, matchExpressions with In) takes a pod with these labels."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", "the only operator that our manifests use"
        exact = exact and labels.get(expression["key"]) in expression["values"]
    return exact
