"""Private run directories: who may enter, when they go, and what is swept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pdserve.fleet.rundirs import run_directory, sweep


def test_a_run_directory_is_private_and_goes_with_the_run() -> None:
    with run_directory("test") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert sweep() == 0
        assert path.exists()
    assert not path.exists()


def test_only_what_a_dead_run_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [
        f"pdserve-{dead.pid}-ray-abc",
        f"pdserve-{os.getpid()}-ray-abc",
        "pdserve-abc",
        "pdserve-1x-ray-a",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    assert sweep(str(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
