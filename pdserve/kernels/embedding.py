"""Table lookups: token embeddings, and the rows of a step whose logits are wanted. Plain torch: copies only.

Legend: T tokens, R rows wanted, V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Embedding(Protocol):
    """What a decoder needs of its token table: `TokenTable`, or what wraps one."""

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """As `embed` of this module, for one fixed table."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """An embedding table on one device."""

    weight_VE: torch.Tensor

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """See `embed`."""
        return embed(token_ids_T, self.weight_VE)


def embed(token_ids_T: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding table, [T, E]. token_ids_T: int32 or int64, inside the vocabulary."""
    return weight_VE.index_select(0, token_ids_T)


def select_rows(x_TE: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """The given rows of x, [R, E]."""
    return x_TE.index_select(0, rows_R)
