"""Private directories of a run, named after their owner's pid, and sweeping those of dead owners."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_PARENT = "/tmp"  # noqa: S108  # private by mkdtemp; TMPDIR may be too long for a socket path
_PREFIX = "pdserve"


@contextlib.contextmanager
def run_directory(kind: str) -> Iterator[Path]:
    """A new directory that only we can enter, gone at the end."""
    sweep()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-{kind}-", dir=_PARENT))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(parent: str = _PARENT) -> int:
    """Removes what killed runs of this user left; returns how many directories."""
    removed = 0
    for path in Path(parent).glob(f"{_PREFIX}-*-*-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and path.lstat().st_uid == os.getuid() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path)
                removed += 1
    return removed
