"""What a user installs: the wheel's top-level names, and that tests run the repository's own services."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer"}


def test_the_wheel_installs_these_names_and_no_others(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    found = {path.name for path in site.iterdir() if (path / "__init__.py").exists()}
    assert found >= PACKAGES
    assert not found & {"tests", "benchmarks", "scripts", "client", "engine", "models", "kernels", "utils"}
    ours = ("kernels", "models", "parallel", "ranks")
    for sources in (*(site / "pdserve" / name / "csrc" for name in ours), site / "kvtransfer" / "csrc"):
        assert list(sources.glob("*.cpp")), "the C++ travels with the wheel"


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_services_are_imported_from_the_repository(name: str) -> None:
    module = importlib.import_module(name)
    assert Path(module.__file__ or "").resolve().is_relative_to(ROOT)
