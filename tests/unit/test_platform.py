"""The sentence that a machine we do not support gets before anything is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_platform.py"


@pytest.mark.parametrize(
    ("system", "machine", "version", "compiler", "venv", "words"),
    [
        ("Darwin", "arm64", (3, 12), True, True, "Linux on x86_64 or aarch64"),
        ("Linux", "riscv64", (3, 12), True, True, "riscv64"),
        ("Linux", "x86_64", (3, 10), True, True, "this is 3.10"),
        ("Linux", "x86_64", (3, 13), True, True, "this is 3.13"),
        ("Linux", "aarch64", (3, 12), False, True, "compiler"),
        ("Linux", "x86_64", (3, 11), True, False, "venv"),
        ("Linux", "x86_64", (3, 11), True, True, ""),
    ],
)
def test_unsupported_machines_get_one_sentence(
    system: str, machine: str, version: tuple[int, int], compiler: bool, venv: bool, words: str
) -> None:
    spec = importlib.util.spec_from_file_location("check_platform", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.problem(system, machine, version, compiler, venv)
    assert words in text
    assert bool(text) == bool(words)
    assert "\n" not in text
