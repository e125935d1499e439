"""Table lookups: token embeddings, and the rows of a step whose logits are wanted. Plain torch: copies only.

Legend: T tokens, R rows wanted, V vocabulary, E hidden size.
"""

from __future__ import annotations

import torch


def embed(token_ids_T: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding table, [T, E]. token_ids_T: int32 or int64, inside the vocabulary."""
    return weight_VE.index_select(0, token_ids_T)


def select_rows(x_TE: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """The given rows of x, [R, E]."""
    return x_TE.index_select(0, rows_R)
