"""The name of how numbers are computed here: pages and prefixes are shared only under equal names.

What lives here: the hash. What does not: any computation.
"""

from __future__ import annotations

import hashlib

import torch

from pdserve.kernels.kv_view import inner_layout

REVISION = 1
"""Raised when the model code changes its order of operations."""


def numerics_id(*, dtype: str, deterministic: bool) -> str:
    """16 hex digits; equal only where a row is computed by the same operations in the same order.

    Thread counts are not in it: every kernel's result is the same for any number of threads.
    """
    parts = (
        f"model-{REVISION}",
        dtype,
        inner_layout(dtype),
        "deterministic" if deterministic else "any",
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
    )
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
