"""`pdserve doctor`: each look on machines that we describe, and the whole on this one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.cli import checks
from pdserve.cli.checks import Check, Verdict
from pdserve.cli.doctor import examine

CPU = "model name\t: Some CPU\nflags\t\t: fpu {}\n"


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [("avx2 avx512f avx512_vnni", Verdict.OK), ("avx2", Verdict.NOTE), ("sse4_2", Verdict.FAIL)],
)
def test_the_cpu_is_judged_by_what_the_kernels_need(flags: str, verdict: Verdict) -> None:
    found = checks.cpu(CPU.format(flags), "x86_64")
    assert found.verdict is verdict
    assert "Some CPU" in found.found
    assert bool(found.advice) is (verdict is not Verdict.OK)


def test_arm64_serves_without_the_kernels() -> None:
    assert checks.cpu("", "aarch64").verdict is Verdict.NOTE


def test_a_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(checks, "PORTS", {port: "gRPC"})
        (found,) = checks.ports()
    assert found.verdict is Verdict.NOTE
    assert found.found == "in use"
    assert "another port" in found.advice


def test_a_quota_below_the_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_cpu_quota", lambda: 0.5)
    found = checks.cores()
    assert found.verdict is Verdict.WARN
    assert "--threads 1" in found.advice


def test_little_memory_and_a_missing_compiler_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_memory_limit", lambda: 10**9)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert checks.memory().verdict is Verdict.WARN
    assert checks.compiler().verdict is Verdict.FAIL
    assert "g++" in checks.compiler().advice


def test_a_look_that_breaks_hides_no_other() -> None:
    def broken() -> Check:
        raise OSError("gone")

    def many() -> Iterator[Check]:
        yield Check(subject="a", verdict=Verdict.OK, found="b")

    first, second = examine((broken, many))
    assert first.verdict is Verdict.WARN
    assert first.subject == "broken"
    assert second.subject == "a"


def test_the_command_tells_of_every_subject_and_loads_neither_torch_nor_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "doctor", "--json"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    subjects = {each["subject"] for each in json.loads(done.stdout)}
    assert {
        "system",
        "cpu",
        "cores",
        "memory",
        "shared memory",
        "compiler",
        "gpu",
        "nixl",
        "torch",
    } <= subjects
    assert done.returncode == 0, done.stdout
    code = (
        "import sys; from pdserve.cli.doctor import examine; list(examine()); "
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    again = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert again.stdout == "set()\n"
