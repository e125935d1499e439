"""A rank's decoder where attention is divided by sequences: all of the model but the experts of others.

What lives here: building it, and how it takes part in the layers that all ranks compute together. What does
not: whose sequence is whose (`pdserve.engine.own_rows`), the exchange (`pdserve.parallel.expert_exchange`).

Each rank has rows of its own, any number of them, none too. Only experts are asked for by all: every rank
calls every mixture of a step, in order, so that those without rows compute the rows of others. Nothing is
added across ranks and every kernel's row depends on itself alone, so the bits are those of one device.

Legend: T tokens of ours, R rows of ours whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.layers.moe import MoE
from pdserve.layers.routers import RouterKind
from pdserve.layers.step import StepContext
from pdserve.models.build import build_decoder
from pdserve.models.config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.sharded_experts import over_ranks, split_experts
from pdserve.parallel.expert_exchange import OwnedRows
from pdserve.parallel.group import Group
from pdserve.parallel.placement_table import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRowsDecoder(Decoder):
    """A decoder whose mixtures all ranks call in every step, with rows or without."""

    def forward(
        self, token_ids_T: torch.Tensor, kv: KVView, meta: AttentionMeta, logit_rows_R: torch.Tensor
    ) -> torch.Tensor:
        """As Decoder's, of our rows, at least one; logits [R, V] of ours alone."""
        return Decoder.forward(self, token_ids_T, kv, meta, logit_rows_R)

    def take_part(self) -> torch.Tensor:
        """A step in which no row is ours; hidden states [0, E]."""
        for layer in self.layers:
            self._mixture_of_none(layer.mlp)
        return self.first_norm_E.new_empty(0, len(self.first_norm_E))

    def _last(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, step: StepContext, rows_R: torch.Tensor
    ) -> torch.Tensor:
        x_RE = Decoder._last(self, x_TE, residual_TE, step, rows_R)
        if rows_R.numel() == 0:  # it ended with the cache's rows
            self._mixture_of_none(self.layers[-1].mlp)
        return x_RE

    def _mixture_of_none(self, mlp: object) -> None:
        if isinstance(mlp, MoE):
            mlp(self.first_norm_E.new_empty(0, len(self.first_norm_E)))


def build_own_rows(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    deterministic: bool,
    group: Group,
    placement: Placement | None = None,
) -> OwnRowsDecoder:
    """The decoder of this rank; a model without experts is everybody's as a whole. placement: as for
    `build_shard`.

    Raises ConfigError for routers whose choices depend on who else is in the step, for too many ranks, and
    for a placement of another model.
    """
    if config.experts is not None and config.experts.router is not RouterKind.CHOICE:
        raise ConfigError(
            "rank_attention: rows is not for routers with a capacity: they count the tokens of the whole step"
        )
    experts = split_experts(config, group.size, placement)
    own = weights if experts is None else experts.cut(weights, group.rank)
    decoder = build_decoder(config, own, deterministic=deterministic)
    if experts is not None:
        rows = OwnedRows(slots=experts.slots, group=group)
        layers = (
            dataclasses.replace(layer, mlp=over_ranks(layer.mlp, experts, rows))
            if isinstance(layer.mlp, MoE)
            else layer
            for layer in decoder.layers
        )
        decoder = dataclasses.replace(decoder, layers=tuple(layers))
    return OwnRowsDecoder(**{field.name: getattr(decoder, field.name) for field in fields(decoder)})
