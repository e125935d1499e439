"""What torch itself does about the same as our kernels, to stand beside them. No clock here.

Legend: M rows, G groups, N outputs, K inputs, B sequences, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def matmul_per_group(x_MK: torch.Tensor, bounds: Sequence[int], weights_GNK: torch.Tensor) -> torch.Tensor:
    """One product per group, its bounds being known on the host already."""
    out_MN = x_MK.new_empty(x_MK.shape[0], weights_GNK.shape[1])
    for group, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            torch.mm(x_MK[begin:end], weights_GNK[group].T, out=out_MN[begin:end])
    return out_MN


def sdpa_on_dense(q_BHD: torch.Tensor, context: int, kv_heads: int) -> Callable[[], object]:
    """Attention over keys and values that lie densely, all contexts equal: no pages to follow."""
    sequences, _, dim = q_BHD.shape
    shape = (sequences, kv_heads, context, dim)
    k, v = (torch.randn(shape, device=q_BHD.device, dtype=q_BHD.dtype) for _ in range(2))
    return lambda: scaled_dot_product_attention(q_BHD[:, :, None], k, v, enable_gqa=True)
