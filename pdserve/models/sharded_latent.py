"""Latent attention over the ranks of a replica: query heads are divided, the latent row is everybody's.

What lives here: which rows and columns of the attention's weights a rank has. What does not: other weights
(`pdserve.parallel.weights`), joining the output projection (`sharded`).

The row per position belongs to all heads, so it is one KV head that every rank computes and keeps (as if
there were more ranks than KV heads); the projections from and to single heads are cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdserve.models.config import LatentConfig
from pdserve.parallel.shards import Shard
from pdserve.parallel.weights import cut


def cut_latent(
    weights: Mapping[str, torch.Tensor], x: LatentConfig, shard: Shard, outputs: range | None
) -> dict[str, torch.Tensor]:
    """The rank's part of every weight, as views. outputs: as for `pdserve.parallel.weights.cut`."""
    head = x.nope_dim + x.rope_dim
    by_head = {
        ".self_attn.q_proj.weight": head,
        ".self_attn.q_b_proj.weight": head,
        ".self_attn.kv_b_proj.weight": x.nope_dim + x.v_dim,
    }
    own: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        width = next((width for end, width in by_head.items() if name.endswith(end)), None)
        if width is None:
            own |= cut({name: weight}, shard, head_dim=x.v_dim, outputs=outputs)
        else:
            own[name] = weight[shard.heads.start * width : shard.heads.stop * width]
    return own
