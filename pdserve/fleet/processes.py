"""Ending exactly the processes we started: by id, never by name. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies, so that none gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel send us SIGTERM when the parent ends; does so itself if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def descendants(but_not: Iterable[int] = ()) -> list[psutil.Process]:
    """Our children and theirs, without the trees of the pids in `but_not`."""
    spared = set(but_not)
    for pid in tuple(spared):
        if psutil.pid_exists(pid):
            spared |= {child.pid for child in _children(psutil.Process(pid))}
    return [child for child in _children(psutil.Process()) if child.pid not in spared]


def end(processes: list[psutil.Process], patience_s: float) -> int:
    """Waits for these processes to end, then kills the rest. Returns how many had to be killed.

    psutil compares start times, so a pid that was given to another process meanwhile is left alone.
    """
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=5.0)
    return len(alive)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
