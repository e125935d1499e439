"""Libraries that were compiled before: which of them is taken, when none is, and that a real one computes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli import checks
from pdserve.errors import ConfigError
from pdserve.kernels import build, prebuilt
from pdserve.kernels.build import build_for, built, chosen_isa, source_hash

SKYLAKE = "avx2 fma avx512f avx512bw avx512vl avx512dq avx512cd bmi1 bmi2 adx"
VNNI = f"{SKYLAKE} avx512_vnni"
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries were compiled to before, for all targets, by a compiler that only notes its calls."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=tmp_path / "log"))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "libraries")
    assert prebuilt.main(tmp_path / "libraries") == 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "libraries"


@pytest.mark.parametrize(
    ("cpu", "names"),
    [
        ("GenuineIntel avx2 fma", ["avx2"]),
        (f"GenuineIntel {SKYLAKE}", ["avx512"]),
        (f"GenuineIntel {VNNI}", ["avx512-vnni", "avx512"]),
        (f"GenuineIntel {VNNI} avx512_bf16", ["avx512-vnni", "avx512"]),
        (f"AuthenticAMD {VNNI} avx512_bf16", ["avx512-dot"]),
    ],
)
def test_the_targets_of_a_cpu(cpu: str, names: list[str]) -> None:
    isa = chosen_isa(cpu, {})
    assert [target.name for target in prebuilt.candidates(isa, cpu)] == names


def test_every_library_is_compiled_for_every_target(folder: Path, tmp_path: Path) -> None:
    found = {path.name for path in folder.glob("*.so")}
    assert found == {
        prebuilt.file_name(name, target, source_hash(sources))
        for name, sources in prebuilt.SOURCES.items()
        for target in prebuilt.TARGETS
    }
    compiled = [line for line in (tmp_path / "log").read_text().splitlines() if " -c " in line]
    sources = [path for folder in prebuilt.SOURCES.values() for path in folder.glob("*.cpp")]
    assert len(compiled) == len(sources) * len(prebuilt.TARGETS)
    assert all("-march=" in line and "native" not in line for line in compiled)


def test_every_folder_of_c_plus_plus_is_among_them() -> None:
    root = Path(prebuilt.__file__).parents[2]
    packages = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer")
    found = {path.parent for package in packages for path in (root / package).rglob("*.cpp")}
    assert found == set(prebuilt.SOURCES.values())


def test_it_is_taken_and_no_compiler_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu", lambda: f"GenuineIntel {VNNI}")
    library = built()
    assert library.parent == folder
    assert library.name == f"kernels-avx512-vnni-{source_hash()}.so"
    assert checks.compiler().found.startswith("none is needed")


def test_of_two_that_fit_the_next_best_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu", lambda: f"GenuineIntel {VNNI}")
    built().unlink()
    assert built().name == f"kernels-avx512-{source_hash()}.so"


def test_one_that_was_changed_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu", lambda: "GenuineIntel avx2 fma")
    built().write_bytes(b"another")
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler is needed"):
        built()


def test_one_of_other_sources_is_not_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cpu", lambda: "GenuineIntel avx2 fma")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("int newer;\n")
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler is needed"):
        built(tmp_path / "csrc")


def test_a_real_one_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by the machine's own compiler for every target, loaded where none is found any more."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "a.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int six() { return 6; }\n'
    )
    (tmp_path / "libraries").mkdir()
    for target in prebuilt.TARGETS:
        build_for("six", sources, target, tmp_path / "libraries")
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "libraries")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert ctypes.CDLL(str(built(sources, "six"))).six() == 6


def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdserve.kernels.prebuilt"]
    environ = {"PATH": "", "CXX": "no-such-compiler", "PYTHONPATH": str(Path(prebuilt.__file__).parents[2])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "a C++ compiler is needed" in done.stderr
