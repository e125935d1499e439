"""Processes below others, found by what they run. Ended ones that nobody waited for run nothing."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """What it was started with; empty once it has ended. Our own children may be zombies."""
    try:
        found: list[str] = process.cmdline()
    except psutil.NoSuchProcess:  # a zombie is one, too
        return []
    return found


def rank_processes(leader: int) -> list[psutil.Process]:
    """The live processes of a replica's other ranks, oldest first. leader: process id of its worker."""
    return [child for child in psutil.Process(leader).children() if "pdserve.ranks" in command_line(child)]
