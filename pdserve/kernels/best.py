"""The best token of each row of logits, and whether the row is made of numbers: one pass over them.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from pdserve.kernels.native import library


def best_tokens(logits_RV: torch.Tensor) -> list[int]:
    """The lowest id of the greatest logits by row; -1 where one is not a finite number. float32."""
    assert logits_RV.dtype is torch.float32
    logits_RV = logits_RV.contiguous()
    best_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    library().pds_best(logits_RV.data_ptr(), *logits_RV.shape, best_R.data_ptr())
    return best_R.tolist()


def best_tokens_reference(logits_RV: torch.Tensor) -> list[int]:
    """Plain torch form of `best_tokens`."""
    rows = zip(logits_RV.numpy().argmax(axis=1).tolist(), logits_RV.isfinite().all(1).tolist(), strict=True)
    return [best if finite else -1 for best, finite in rows]
