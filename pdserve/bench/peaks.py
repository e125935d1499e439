"""What this machine can do at most, measured: operations of products by data type, bandwidth by size.

What lives here: timing the loops of `pdserve.kernels.peaks`. What does not: what a step would need of it
(`floors`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pdserve.bench.floors import Peaks
from pdserve.kernels.memory import empty_weight
from pdserve.kernels.peaks import PRODUCTS, products, read

ROUNDS = 4000
MIB = 1 << 20
DEFAULT_SIZES = (16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, 1024 * MIB)


def measure_peaks(
    sizes: Sequence[int] = DEFAULT_SIZES, *, seconds: float = 0.5, done: Callable[[], None] = lambda: None
) -> Peaks:
    """The best of many tries of each. sizes: bytes. seconds: for each. done: called after each."""
    speeds = {}
    for kind in PRODUCTS:
        speeds[kind] = _best(partial(products, kind, ROUNDS), seconds)
        done()
    bandwidth = []
    for size in sizes:
        data = empty_weight(size, torch.uint8)
        data.fill_(1)
        bandwidth.append((size, _best(partial(_read, data), seconds)))
        done()
    return Peaks(products=speeds, bandwidth=tuple(bandwidth))


def num_peaks(sizes: Sequence[int]) -> int:
    """How often `measure_peaks` calls done."""
    return len(PRODUCTS) + len(sizes)


def _read(data: torch.Tensor) -> int:
    read(data)
    return data.numel()


def _best(work: Callable[[], int], seconds: float) -> float:
    """The most that work does in a second, of all its calls in so long; the first call does not count."""
    work()
    best, end = 0.0, time.monotonic() + seconds
    while not best or time.monotonic() < end:
        begin = time.perf_counter()
        amount = work()
        best = max(best, amount / (time.perf_counter() - begin))
        if not amount:
            return 0.0
    return best
