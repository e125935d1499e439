"""Writes deploy/k8s from the chart: a kustomize base of its defaults, an overlay for each of its examples.

For people without Helm. An overlay says what its example changes, as JSON patches, adds and deletes. Left out
are Secrets, which docs/deploy.md has made by hand, Helm's own labels and test pod, and dashboards and rules,
which lie in deploy/grafana and deploy/prometheus. usage: python scripts/gen_k8s.py [--check] [--helm PROGRAM]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "pdserve"
TARGET = ROOT / "deploy" / "k8s"
NAME = NAMESPACE = "pdserve"
SETTINGS = (
    *("secrets.create=false", "secrets.fleet=pdserve-fleet", "secrets.rayToken=pdserve-ray-token"),
    *("monitoring.dashboards=false", "monitoring.rules=false"),
)
HELMS_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
NOTICE = "# Written by scripts/gen_k8s.py from the chart; do not edit.\n"
Object = dict[str, Any]


class Dumper(yaml.SafeDumper):
    """Texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def dump(*documents: Any) -> str:
    """As YAML, with the notice."""
    texts = [yaml.dump(one, Dumper=Dumper, sort_keys=False, width=110) for one in documents]
    return NOTICE + "---\n".join(texts)


def objects(helm: str, example: Path | None) -> dict[str, list[Object]]:
    """What the chart makes of its defaults or an example, by the template each comes from."""
    values = ["-f", str(example)] if example else []
    command = [
        helm,
        "template",
        NAME,
        str(CHART),
        "--namespace",
        NAMESPACE,
        *values,
        "--set",
        ",".join(SETTINGS),
    ]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Object]] = {}
    for text in re.split(r"^---\n", made, flags=re.MULTILINE):
        one = yaml.safe_load(text)
        source = re.search(r"^# Source: pdserve/templates/(\S+)", text, re.MULTILINE)
        if one and source and wanted(one):
            found.setdefault(source[1], []).append(plain(one))
    return {name: found[name] for name in sorted(found)}


def wanted(one: Object) -> bool:
    """Whether an object is for people without Helm as well."""
    return one["kind"] != "Secret" and "helm.sh/hook" not in one["metadata"].get("annotations", {})


def plain(one: Object) -> Object:
    """Without what is Helm's; the namespace is kustomize's to set."""
    one["metadata"].pop("namespace", None)
    for name in HELMS_LABELS:
        one["metadata"].get("labels", {}).pop(name, None)
    return one


def key(one: Object) -> tuple[str, str]:
    """What an object is known by."""
    return one["kind"], one["metadata"]["name"]


def changes(old: Any, new: Any, path: str = "") -> list[Object]:
    """The JSON patch from one to the other; lists of unlike lengths are replaced whole."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            step
            for name in (*old, *(x for x in new if x not in old))
            for step in _entry(old, new, name, path)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [step for i, (one, other) in pairs for step in changes(one, other, f"{path}/{i}")]
    return [{"op": "replace", "path": path, "value": new}]


def _entry(old: Object, new: Object, name: str, path: str) -> list[Object]:
    at = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
    if name not in new:
        return [{"op": "remove", "path": at}]
    if name not in old:
        return [{"op": "add", "path": at, "value": new[name]}]
    return changes(old[name], new[name], at)


def base(made: dict[str, list[Object]]) -> dict[str, str]:
    """Files of the base."""
    files = {name: dump(*found) for name, found in made.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": list(files),
    }
    return files | {"kustomization.yaml": dump(kustomization)}


def overlay(before: dict[str, list[Object]], after: dict[str, list[Object]]) -> dict[str, str]:
    """Files that turn the base into an example."""
    old = {key(one): one for found in before.values() for one in found}
    new = {key(one): one for found in after.values() for one in found}
    files: dict[str, str] = {}
    patches: list[Object] = []
    for (kind, name), one in old.items():
        target = {"target": {"kind": kind, "name": name}}
        if (kind, name) not in new:
            gone = {
                "$patch": "delete",
                "apiVersion": one["apiVersion"],
                "kind": kind,
                "metadata": {"name": name},
            }
            patches.append({"patch": yaml.dump(gone, sort_keys=False)})
        elif steps := changes(one, new[kind, name]):
            file = f"{kind.lower()}-{name}.yaml"
            files[file] = dump(steps)
            patches.append({"path": file, **target})
    added = [one for which, one in new.items() if which not in old]
    resources = ["../../base"]
    if added:
        files["added.yaml"] = dump(*added)
        resources.append("added.yaml")
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": resources,
        "patches": patches,
    }
    return files | {"kustomization.yaml": dump(kustomization)}


def everything(helm: str) -> dict[str, str]:
    """All files below deploy/k8s by their paths there."""
    defaults = objects(helm, None)
    folders = {"base": base(defaults)}
    for example in sorted((CHART / "examples").glob("*.yaml")):
        folders[f"overlays/{example.stem}"] = overlay(defaults, objects(helm, example))
    return {f"{folder}/{name}": text for folder, files in folders.items() for name, text in files.items()}


def main() -> int:
    """Exit code 1 when --check finds a file that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--helm", default=shutil.which("helm") or str(ROOT / ".cache" / "tools" / "helm"))
    options = parser.parse_args()
    wanted_files = everything(options.helm)
    found = {str(path.relative_to(TARGET)): path.read_text() for path in TARGET.rglob("*.yaml")}
    if options.check:
        stale = sorted(name for name in {*found, *wanted_files} if found.get(name) != wanted_files.get(name))
        print("\n".join(f"deploy/k8s/{name} is not what the chart makes" for name in stale), end="")
        return 1 if stale else 0
    shutil.rmtree(TARGET, ignore_errors=True)
    for name, text in wanted_files.items():
        (TARGET / name).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
