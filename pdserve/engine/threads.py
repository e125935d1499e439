"""How many threads the engine computes with: OMP_NUM_THREADS, for torch and for our kernels alike."""

from __future__ import annotations

import os

import torch


def thread_count() -> int:
    """OMP_NUM_THREADS if it is a positive number, else the processors this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0))


def apply_thread_count() -> None:
    """Sets torch's thread count for the whole process."""
    if torch.get_num_threads() != thread_count():
        torch.set_num_threads(thread_count())
