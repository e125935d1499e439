"""What a number was measured on and with: the machine, our version, the date. No names of hosts or users."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

from pdserve.bench.machine import machine, now


def us() -> str:
    """Our version, its commit (with + if the tree differs from it) and the torch beneath."""
    found = f"pdserve {version('pdserve')}"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        found += f" ({done.stdout.strip()})"
    return f"{found}, torch {version('torch')}, ray {version('ray')}"


__all__ = ["machine", "now", "us"]
