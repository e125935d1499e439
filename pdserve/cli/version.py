"""`pdserve version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

PARTS = ("pdserve", "torch", "ray", "grpcio", "protobuf", "tokenizers")


def run() -> None:
    """Prints a line for each part; those of other extras may be missing."""
    for name in PARTS:
        try:
            print(f"{name:<10} {installed(name)}")
        except PackageNotFoundError:
            print(f"{name:<10} not installed")
    print(f"{'python':<10} {platform.python_version()} on {platform.system()} {platform.machine()}")
