"""The GPU kernels without a GPU: against plain forms in Triton's interpreter, and compiled for an H200.

Both in processes of their own: the interpreter is chosen by the environment before Triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_tree import ROOT


def told_by(module: str, cache: Path, **environment: str) -> Any:
    """The JSON that a module of tests.support prints."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}"],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_kernels_agree_with_plain_forms(tmp_path: Path) -> None:
    told = told_by("triton_cases", tmp_path, TRITON_INTERPRET="1")
    assert len(told) > 30
    assert {name: wrong for name, wrong in told.items() if wrong} == {}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    told: dict[str, dict[str, int]] = told_by("triton_build", tmp_path_factory.mktemp("triton"))
    return told


def test_products_use_the_tensor_cores_of_an_h200(built: dict[str, dict[str, int]]) -> None:
    """Warp-group products where rows are many; few rows would leave most of one idle."""
    assert built["grouped many rows"]["wgmma.mma_async"]
    assert built["grouped few rows"]["mma.sync"]
    assert built["attention bf16"]["mma.sync"]


def test_keys_values_and_weights_are_loaded_16_bytes_at_a_time(built: dict[str, dict[str, int]]) -> None:
    for name in ("grouped few rows", "grouped many rows", "attention bf16", "attention fp32"):
        assert built[name]["cp.async.cg.shared.global"], name
    assert built["page copy"]["v4.b32"]


def test_nothing_spills_to_local_memory(built: dict[str, dict[str, int]]) -> None:
    assert {name: counts["st.local"] for name, counts in built.items() if counts["st.local"]} == {}


def test_the_prepared_check_for_a_gpu_runs(tmp_path: Path) -> None:
    """Tiny shapes in the interpreter: it can run, and says what it saw."""
    ran = subprocess.run(
        ["benchmarks/gpu/run.sh", "--interpret", "--out", str(tmp_path), "--seed", "7"],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = tmp_path.glob("gpu-*-interpreted.json")
    told = json.loads(path.read_text())
    assert told["interpreted"]
    assert told["machine"]["gpu"] is None
    assert [line["good"] for line in told["checks"]] == [True] * 5
    assert "speeds" not in told


def test_without_a_gpu_the_check_refuses_to_measure() -> None:
    ran = subprocess.run(
        ["benchmarks/gpu/run.sh"],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 2
    assert "no GPU is to be seen" in ran.stderr
