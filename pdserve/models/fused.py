"""A dense decoder whose layers run as one call: what `Decoder.forward` computes, bit for bit, in less time.

What lives here: which decoders can be run so. What does not: the call (`pdserve.kernels.stack`), other
decoders (mixtures, latent attention, several ranks), which run operator by operator (`decoder`).

Legend: T tokens, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.embedding import Embedding
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.linear import Linear, PackedLinear
from pdserve.kernels.quant_linear import QuantLinear
from pdserve.kernels.stack import Stack, StackLayer
from pdserve.layers.attention import Attention
from pdserve.layers.mlp import GatedMLP
from pdserve.layers.rope import RopeTable
from pdserve.models.decoder import Decoder, DecoderLayer


class Model(Protocol):
    """What computes a step: `Decoder` or `FusedDecoder`."""

    def forward(
        self, token_ids_T: torch.Tensor, kv: KVView, meta: AttentionMeta, logit_rows_R: torch.Tensor
    ) -> torch.Tensor:
        """As `Decoder.forward`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedDecoder:
    """See the module."""

    embedding: Embedding
    rope: RopeTable
    stack: Stack

    def forward(
        self, token_ids_T: torch.Tensor, kv: KVView, meta: AttentionMeta, logit_rows_R: torch.Tensor
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        cos_TD, sin_TD = self.rope.rows(meta.positions_T)
        return self.stack.run(self.embedding(token_ids_T), cos_TD, sin_TD, kv, meta, logit_rows_R)


def fused(decoder: Decoder) -> Model:
    """The decoder as one call where all its parts are of kinds that can, else itself."""
    layers = [_stack_layer(layer) for layer in decoder.layers]
    known = [layer for layer in layers if layer is not None]
    head = decoder.head
    if len(known) < len(layers) or not isinstance(head, (PackedLinear, QuantLinear)):
        return decoder
    first = decoder.layers[0].attention
    assert isinstance(first, Attention)
    return FusedDecoder(
        embedding=decoder.embedding,
        rope=decoder.rope,
        stack=Stack(
            layers=known,
            head=head,
            first_norm_E=decoder.first_norm_E,
            num_heads=first.num_heads,
            eps=decoder.eps,
        ),
    )


def _stack_layer(layer: DecoderLayer) -> StackLayer | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
        return None
    if attention.whole_norm is not None or attention.clip is not None:
        return None
    linears = _packed((attention.qkv, attention.out, mlp.gate_up, mlp.down))
    if linears is None:
        return None
    return StackLayer(
        qkv=linears[0],
        out=linears[1],
        gate_up=linears[2],
        down=linears[3],
        mlp_norm_E=layer.mlp_norm_E,
        next_norm_E=layer.next_norm_E,
        q_norm_D=attention.q_norm_D,
        k_norm_D=attention.k_norm_D,
        window=attention.window,
        scale=attention.scale,
        eps=attention.eps,
    )


def _packed(linears: Sequence[Linear]) -> list[PackedLinear | QuantLinear] | None:
    """The linears, if all are ours and of this process alone."""
    known = [linear for linear in linears if isinstance(linear, (PackedLinear, QuantLinear))]
    return known if len(known) == len(linears) else None
