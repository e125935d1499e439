"""deploy/k8s is the chart for people without Helm: what kustomize builds is what Helm renders."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from tests.support.chart import CHART, EXAMPLES
from tests.support.manifests import Manifest, load, name_of, problem
from tests.support.source_tree import ROOT
from tests.support.tools import tool

OVERLAYS = ("base", *(f"overlays/{name}" for name in EXAMPLES))


def script() -> ModuleType:
    """scripts/gen_k8s.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("gen_k8s", ROOT / "scripts" / "gen_k8s.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(folder: str) -> dict[str, Manifest]:
    """What kustomize makes of a folder below deploy/k8s, by name."""
    command = [tool("kubectl"), "kustomize", str(ROOT / "deploy" / "k8s" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {name_of(manifest): manifest for manifest in load(done.stdout)}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_kustomize_builds_what_helm_renders(folder: str) -> None:
    generator = script()
    example = None if folder == "base" else CHART / "examples" / f"{folder.partition('/')[2]}.yaml"
    rendered = generator.objects(tool("helm"), example)
    wanted = {name_of(one): one for found in rendered.values() for one in found}
    for one in wanted.values():
        one["metadata"]["namespace"] = generator.NAMESPACE
    found = built(folder)
    assert set(found) == set(wanted)
    assert [name for name in found if found[name] != wanted[name]] == []
    assert [text for text in map(problem, found.values()) if text] == []


def test_the_files_are_current() -> None:
    command = [sys.executable, "scripts/gen_k8s.py", "--check", "--helm", tool("helm")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\nrun python scripts/gen_k8s.py"


def test_nothing_secret_is_in_them_and_every_secret_that_is_mounted_is_explained() -> None:
    docs = (ROOT / "docs" / "deploy.md").read_text()
    for folder in OVERLAYS:
        found = built(folder)
        assert not [name for name in found if name.startswith("Secret/")]
    base = built("base")
    made = {
        one["spec"]["secretName"] for one in base.values() if one["kind"] == "Certificate" and "spec" in one
    }
    mounted = {
        volume["secret"]["secretName"]
        for one in base.values() if one["kind"] == "Deployment"
        for volume in one["spec"]["template"]["spec"]["volumes"] if "secret" in volume
    }  # fmt: skip
    assert mounted - made == {"pdserve-fleet", "pdserve-ray-token"}
    for name in mounted - made:
        assert f"kubectl -n pdserve create secret generic {name} " in docs
