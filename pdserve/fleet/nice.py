"""The nice value of a worker's process, raised before its libraries start threads."""

from __future__ import annotations

import os


def raise_nice(by: int) -> None:
    """Adds to the nice value of every thread; Linux keeps it by thread, and later ones inherit it."""
    if not by:
        return
    for thread in os.listdir("/proc/self/task"):
        current = os.getpriority(os.PRIO_PROCESS, int(thread))
        os.setpriority(os.PRIO_PROCESS, int(thread), current + by)
