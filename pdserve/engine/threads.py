"""How many threads the engine computes with: OMP_NUM_THREADS, for torch and for our kernels alike."""

from __future__ import annotations

import os

from pdserve.kernels.native import set_num_threads


def thread_count() -> int:
    """OMP_NUM_THREADS if it is a positive number, else the processors this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0))


def apply_thread_count(threads: int | None = None) -> None:
    """Sets the thread count of the whole process, by default `thread_count()`. No result depends on it."""
    set_num_threads(threads or thread_count())
