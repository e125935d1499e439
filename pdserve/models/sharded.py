"""One rank's share of a model: built as a small model of its own, then joined to the others.

What lives here: which linears of a built decoder are replaced by parallel ones. What does not: the parallel
linears (`pdserve.parallel`), the single-device model, which knows nothing of ranks (`build`, `decoder`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.embedding import TokenTable
from pdserve.kernels.linear import Linear, PackedLinear
from pdserve.layers.mlp import GatedMLP
from pdserve.layers.moe import MoE
from pdserve.layers.routers import RouterKind
from pdserve.models.build import build_decoder
from pdserve.models.config import ModelConfig
from pdserve.models.decoder import Decoder, DecoderLayer, FeedForward
from pdserve.models.sharded_experts import ExpertSplit, over_ranks, split_experts
from pdserve.models.sharded_latent import cut_latent
from pdserve.parallel.expert_exchange import SharedRows
from pdserve.parallel.group import Group
from pdserve.parallel.linears import GatheredLinear, ReducedLinear, VocabHead, VocabTable
from pdserve.parallel.placement_table import Placement
from pdserve.parallel.shards import Shard, shards, split
from pdserve.parallel.weights import cut, widths

NEVER = 1 << 62
"""Bytes that no all-to-all saves."""


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The rank's part as a model: its heads and columns. The vocabulary stays whole, for ids are checked.

    Raises ConfigError for norms over all heads together.
    """
    if config.qk_norm_whole:
        raise ConfigError("tp: norms over all heads together can not be divided over ranks yet")
    return dataclasses.replace(
        config,
        num_heads=len(shard.heads),
        num_kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.mlp),
    )


def build_shard(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    deterministic: bool,
    group: Group,
    placement: Placement | None = None,
) -> Decoder:
    """The decoder of this rank. config, weights: the whole model's; what belongs to others is not kept.

    placement: of experts; None: in order. No bit depends on it.

    deterministic: gathers in place of sums, so that every rank count computes the same bits. All ranks call
    `forward` with the same arguments (their own cache apart); only rank 0 gets logits. Raises ConfigError
    where the model can not be divided so.
    """
    plan = shards(config, group.size)
    shard, outputs = plan[group.rank], split(config.hidden_size, group.size)
    own = _cut(config, weights, shard, outputs[group.rank] if deterministic else None)
    experts = split_experts(config, group.size, placement)
    if experts is not None:
        own = experts.cut(own, group.rank)
    decoder = build_decoder(shard_config(config, shard), own, deterministic=deterministic)
    joint = _Joint(
        heads=widths((s.heads for s in plan), config.latent.v_dim if config.latent else config.head_dim),
        mlp=widths(s.mlp for s in plan),
        vocab=tuple(s.vocab for s in plan),
        outputs=widths(outputs),
        experts=experts,
        deterministic=deterministic,
        group=group,
    )
    return joint.decoder(decoder)


def build_repeated(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    deterministic: bool,
    group: Group,
    placement: Placement | None = None,
) -> Decoder:
    """The decoder of a rank where experts alone are divided and all the rest is everybody's, so that the
    others can go on without it. Exchanges rows of experts by gathers only. Raises ConfigError.
    """
    experts = split_experts(config, group.size, placement)
    if experts is None or config.experts is None or config.experts.router is not RouterKind.CHOICE:
        raise ConfigError(
            "rank_attention: repeated is for mixtures of experts without a router's random state"
        )
    decoder = build_decoder(config, experts.cut(weights, group.rank), deterministic=deterministic)
    rows = SharedRows(slots=experts.slots, group=group, least_saving=NEVER)
    layers = (
        dataclasses.replace(layer, mlp=over_ranks(layer.mlp, experts, rows))
        if isinstance(layer.mlp, MoE)
        else layer
        for layer in decoder.layers
    )
    return dataclasses.replace(decoder, layers=tuple(layers))


def _cut(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], shard: Shard, outputs: range | None
) -> dict[str, torch.Tensor]:
    if config.latent is not None:
        return cut_latent(weights, config.latent, shard, outputs)
    return cut(weights, shard, head_dim=config.head_dim, outputs=outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """What the ranks have together. heads, mlp, outputs: columns by rank. vocab: rows by rank."""

    heads: tuple[int, ...]
    mlp: tuple[int, ...]
    outputs: tuple[int, ...]
    vocab: tuple[range, ...]
    experts: ExpertSplit | None
    deterministic: bool
    group: Group

    def decoder(self, decoder: Decoder) -> Decoder:
        """The same decoder with its row-parallel linears, table and head joined to the other ranks'."""
        table, head = decoder.embedding, decoder.head
        assert isinstance(table, TokenTable)
        assert isinstance(head, PackedLinear)
        return dataclasses.replace(
            decoder,
            embedding=VocabTable(
                weight=table.weight_VE.clone(), vocab=self.vocab[self.group.rank], group=self.group
            ),
            layers=tuple(self._layer(layer) for layer in decoder.layers),
            head=VocabHead(inner=head, widths=widths(self.vocab), group=self.group),
        )

    def _layer(self, layer: DecoderLayer) -> DecoderLayer:
        out = self._joined(layer.attention.out, self.heads)
        return dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, out=out), mlp=self._feed_forward(layer.mlp)
        )

    def _feed_forward(self, mlp: FeedForward) -> FeedForward:
        """Dense ones are divided by column; of a mixture the experts are, the shared one is everybody's."""
        if isinstance(mlp, MoE):
            assert self.experts is not None
            rows = SharedRows(slots=self.experts.slots, group=self.group)
            return over_ranks(mlp, self.experts, rows)
        assert isinstance(mlp, GatedMLP)
        return dataclasses.replace(mlp, down=self._joined(mlp.down, self.mlp))

    def _joined(self, inner: Linear, widths_in: tuple[int, ...]) -> Linear:
        assert isinstance(inner, PackedLinear)
        if not self.deterministic:
            return ReducedLinear(inner=inner, group=self.group)
        return GatheredLinear(inner=inner, widths_in=widths_in, widths_out=self.outputs, group=self.group)
