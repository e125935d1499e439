"""A rank's weights: rows and columns cut out of the whole model's, by name.

What lives here: which dimension of which weight belongs to which range of the shard. What does not: the
ranges (`shards`), packing and building (`pdserve.models`). Weights that are not named here are whole on every
rank (norms).

Legend: linears are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pdserve.parallel.shards import Shard

BY_OUTPUT = {
    "self_attn.q_proj": "heads",
    "self_attn.k_proj": "kv_heads",
    "self_attn.v_proj": "kv_heads",
    "mlp.gate_proj": "mlp",
    "mlp.up_proj": "mlp",
    "model.embed_tokens": "vocab",
    "lm_head": "vocab",
}
"""Weights whose outputs (rows, biases too) are divided."""
BY_INPUT = {"self_attn.o_proj": "heads", "mlp.down_proj": "mlp"}
"""Weights whose inputs (columns) are divided, and which therefore need the other ranks' products."""


def cut(
    weights: Mapping[str, torch.Tensor], shard: Shard, *, head_dim: int, outputs: range | None
) -> dict[str, torch.Tensor]:
    """The rank's part of every weight, as views.

    outputs: None to cut BY_INPUT weights by their inputs (the bias stays on rank 0 alone); or the hidden
    columns that the rank computes, to cut them by their outputs.
    """
    return {name: _part(name, weight, shard, head_dim, outputs) for name, weight in weights.items()}


def _part(
    name: str, weight: torch.Tensor, shard: Shard, head_dim: int, outputs: range | None
) -> torch.Tensor:
    stem, _, kind = name.rpartition(".")
    if (found := _match(stem, BY_OUTPUT)) is not None:
        return _slice(weight, 0, _range(shard, found, head_dim))
    if (found := _match(stem, BY_INPUT)) is None:
        return weight
    if outputs is not None:
        return _slice(weight, 0, outputs)
    if kind == "bias":
        return weight if shard.rank == 0 else torch.zeros_like(weight)
    return _slice(weight, 1, _range(shard, found, head_dim))


def _match(stem: str, table: Mapping[str, str]) -> str | None:
    return next((what for end, what in table.items() if stem == end or stem.endswith("." + end)), None)


def _range(shard: Shard, what: str, head_dim: int) -> range:
    part: range = getattr(shard, what)
    width = head_dim if what in ("heads", "kv_heads") else 1
    return range(part.start * width, part.stop * width)


def _slice(weight: torch.Tensor, dim: int, part: range) -> torch.Tensor:
    return weight.narrow(dim, part.start, len(part))


def widths(parts: Iterable[range], unit: int = 1) -> tuple[int, ...]:
    """Columns by rank. unit: columns of one index (a head's dimension)."""
    return tuple(len(part) * unit for part in parts)
