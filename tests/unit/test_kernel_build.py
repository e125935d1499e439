"""The kernels' build: which instruction set, when it is built, and what is said where it can not be.

The compiler is a shell script here; the real one is at work in the conformance suite.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.kernels.build import chosen_isa, ensure_built, plan_build

AVX512 = "avx2 fma avx512f avx512bw avx512vl avx512dq"
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "test compiler 1.0" && exit 0
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done
exit {status}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a compiler that notes its calls in `log`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_compiler(tmp_path, monkeypatch, status=0)
    return tmp_path / "cache" / "pdserve"


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, *, status: int) -> None:
    script = folder / f"compiler-{status}"
    script.write_text(COMPILER.format(log=folder / "log", status=status))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


@pytest.mark.parametrize(
    ("cpu", "environ", "isa"),
    [
        (f"GenuineIntel {AVX512} avx512_bf16", {}, "avx512"),
        (f"AuthenticAMD {AVX512} avx512_bf16", {}, "avx512-dot"),
        (f"AuthenticAMD {AVX512}", {}, "avx512"),
        ("GenuineIntel avx2 fma", {}, "avx2"),
        ("GenuineIntel avx2 fma avx512f", {}, "avx2"),
        (f"GenuineIntel {AVX512}", {"PDSERVE_KERNEL_ISA": "avx2"}, "avx2"),
        (f"GenuineIntel {AVX512}", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
        (f"GenuineIntel {AVX512}", {"ATEN_CPU_CAPABILITY": "avx2"}, "avx512"),
    ],
)
def test_instruction_set(cpu: str, environ: dict[str, str], isa: str) -> None:
    assert chosen_isa(cpu, environ) == isa


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="PDSERVE_KERNEL_ISA"):
        chosen_isa("GenuineIntel", {"PDSERVE_KERNEL_ISA": "sse2"})


def test_built_once_by_whoever_comes_first(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_build()
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: ensure_built(plan), range(8)))
    assert libraries == {cache / f"kernels-{plan.key}.so"}
    links = [line for line in (tmp_path / "log").read_text().splitlines() if "-shared" in line]
    assert len(links) == 1
    assert capfd.readouterr().err.count("building CPU kernels") == 1


def test_another_instruction_set_is_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for isa in ("avx2", "avx512", "avx512-dot"):
        monkeypatch.setenv("PDSERVE_KERNEL_ISA", isa)
        plans.append(plan_build())
    assert len({plan.key for plan in plans}) == 3
    assert len({plan.source_hash for plan in plans}) == 1


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler is needed"):
        plan_build()


def test_a_failed_build_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(tmp_path, monkeypatch, status=1)
    with pytest.raises(ConfigError, match="did not compile"):
        ensure_built(plan_build())
    assert not list(cache.glob("*.so"))


def test_a_file_that_is_not_the_one_built_is_built_again(cache: Path, tmp_path: Path) -> None:
    library = ensure_built(plan_build())
    built = library.read_bytes()
    library.write_bytes(built[:-1])
    assert ensure_built(plan_build()).read_bytes() == built
    library.with_suffix(".sha256").unlink()
    ensure_built(plan_build())
    assert (tmp_path / "log").read_text().count("-shared") == 3


def test_the_cache_is_closed_to_others(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    ensure_built(plan_build())
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="another user's"):
        ensure_built(plan_build())
