"""The name of how numbers are computed here: pages and prefixes are shared only under equal names.

What lives here: the hash. What does not: any computation.
"""

from __future__ import annotations

import hashlib

import torch

from pdserve.kernels import native

REVISION = 1
"""Raised when the model code changes its order of operations."""


def numerics_id(
    *,
    dtype: str,
    deterministic: bool,
    ranks: int = 1,
    exchange: str = "",
    weights: str = "exact",
    pages: str | None = None,
) -> str:
    """16 hex digits; equal only where a row is computed by the same operations in the same order.

    dtype: of weights and activations. pages: of pages; None: the same. ranks: tensor-parallel ones, exchange:
    how they add products; they count only where ranks add, which deterministic ones do not do. weights: the
    scheme of linears (`models.precision`).
    Thread counts are not in it: no result depends on them.
    """
    parts = (
        f"model-{REVISION}",
        native.numerics_id(dtype),
        "deterministic" if deterministic else "any",
        *([weights] if weights != "exact" else []),
        *([f"pages-{pages}"] if pages not in (None, dtype) else []),
        *([f"ranks-{ranks}-{exchange}"] if ranks > 1 and not deterministic else []),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
    )
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
