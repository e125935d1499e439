"""What the machine can do at most: products in registers and reading memory, for benchmarks to compare with.

What lives here: calls of the compiled loops (csrc/peaks.cpp), on as many threads as kernels have. What does
not: timing them (`pdserve.bench.peaks`).
"""

from __future__ import annotations

import torch

from pdserve.kernels.native import library

PRODUCTS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""By what is multiplied. bfloat16: pairs, where the CPU has such products; int8: four at a time."""
READ_UNIT_BYTES = 1024


def products(kind: str, rounds: int) -> int:
    """Runs a loop of products; operations done, a multiplication and an addition being two. 0: the CPU has
    no such products.
    """
    done: int = library().pds_products(PRODUCTS[kind], rounds)
    return done


def read(data: torch.Tensor) -> None:
    """Reads a tensor's bytes once. data: contiguous, aligned, a multiple of READ_UNIT_BYTES long."""
    size = data.numel() * data.element_size()
    assert data.is_contiguous()
    assert size % READ_UNIT_BYTES == 0
    assert data.data_ptr() % 64 == 0
    library().pds_read(data.data_ptr(), size)
