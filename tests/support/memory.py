"""Memory of the test process itself: what ended workers held goes back, and how much was left at the least.

What lives here: collecting and trimming after workers that ran inside this process. What does not: the
memory of worker processes, which ends with them.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

_TRIM_ABOVE = 1 << 30


def give_back() -> None:
    """Frees ended workers' models and pools, which lie in reference cycles, and returns them to the system.

    A full collection comes seldom by itself among so many objects; without it each in-process pair of
    workers leaves some 2 GB behind, and the suite ends by running out of memory.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_if_large() -> None:
    """`give_back` where this process has grown past 1 GiB."""
    if resident_bytes() > _TRIM_ABOVE:
        give_back()


def resident_bytes() -> int:
    """This process's resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def available_bytes() -> int:
    """What the kernel could give to new processes of this machine now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
