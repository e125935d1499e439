"""Failpoints: only in tests, from a closed list, as often as asked, changeable while a process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.failpoints import TESTING, VARIABLE, Action, Failpoints, Kind


def armed(text: str) -> Failpoints:
    return Failpoints({VARIABLE: text, TESTING: "1"})


def test_nothing_happens_without_the_variable() -> None:
    points = Failpoints({})
    assert not points.on
    assert points.hit("compute") is None


@pytest.mark.parametrize("testing", [{}, {TESTING: "0"}, {TESTING: "yes"}])
def test_faults_are_refused_outside_of_tests(testing: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="faults are for tests"):
        Failpoints({VARIABLE: "wire=stall:1", **testing})


@pytest.mark.parametrize("command", [["pdserve.worker"], ["pdserve.cli", "router", "--port", "0"]])
def test_processes_refuse_to_start_with_faults_outside_of_tests(command: list[str]) -> None:
    environ = {k: v for k, v in os.environ.items() if k != TESTING}
    environ |= {VARIABLE: "wire=stall:1", "PDSERVE_FLEET_SECRET": "ab" * 32}
    config = '{"worker_id": "w", "role": "decode", "model": "m", "fleet_secret": "' + "ab" * 32 + '"}'
    done = subprocess.run(
        [sys.executable, "-m", *command],
        input=config,
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert "faults are for tests" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["wire", "wire=stall:x", "nowhere=stall:1", "wire=explode:1"])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no failpoint"):
        armed(text)


def test_a_fault_fires_as_often_as_asked_and_only_at_its_place() -> None:
    points = armed("wire=stall:0.05*2; verify=corrupt:7")
    assert [points.hit("wire") for _ in range(3)] == [Action(Kind.STALL, 0.05)] * 2 + [None]
    assert [points.hit("verify") for _ in range(3)] == [Action(Kind.CORRUPT, 7.0)] * 3
    assert points.hit("compute") is None


def test_a_running_process_takes_a_changed_file_and_counts_anew(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    points = armed(f"@{file}")
    assert points.hit("wire") is None
    file.write_text("wire=stall:1*1")
    assert points.hit("wire") == Action(Kind.STALL, 1.0)
    assert points.hit("wire") is None
    file.write_text("wire=stall:2*1")
    assert points.hit("wire") == Action(Kind.STALL, 2.0)
