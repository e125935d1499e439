"""The decoder-only model, written once for all architectures and for one device.

What lives here: from token ids to logits over a paged cache. What does not: weights' names and packing
(`build`), batching and sampling (`pdserve.engine`), parallelism.

Legend: T tokens, R rows whose results are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.embedding import Embedding, select_rows
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.linear import Linear
from pdserve.kernels.norm import add_rms_norm, rms_norm
from pdserve.layers.attention import Attention
from pdserve.layers.latent import LatentAttention
from pdserve.layers.moe import ExpertLoad
from pdserve.layers.rope import RopeTable
from pdserve.layers.step import StepContext


class FeedForward(Protocol):
    """The second half of a layer: dense (`GatedMLP`) or a mixture of experts (`MoE`)."""

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] to [T, E]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer. mlp_norm_E: before the MLP; next_norm_E: before the next layer, or the final norm."""

    attention: Attention | LatentAttention
    mlp: FeedForward
    mlp_norm_E: torch.Tensor
    next_norm_E: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model ready to run. embedding: the token table; head: its logits' linear layer.

    expert_load: tokens by layer and expert, counted as they are computed; None for a dense model.
    """

    embedding: Embedding
    first_norm_E: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    head: Linear
    eps: float
    rope: RopeTable
    expert_load: ExpertLoad | None = None

    def forward(
        self, token_ids_T: torch.Tensor, kv: KVView, meta: AttentionMeta, logit_rows_R: torch.Tensor
    ) -> torch.Tensor:
        """Computes the step's rows into the cache; returns logits [R, V], float32.

        token_ids_T: int64, inside the vocabulary. logit_rows_R: int64, ascending; may be empty. Which other
        rows there are changes no row's result.
        """
        return self.logits(self.hidden(token_ids_T, kv, meta, logit_rows_R))

    def logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V], float32, of what `hidden` returned."""
        if x_RE.shape[0] == 0:
            return torch.empty(0, self.head.num_out)
        return self.head(x_RE, out_float32=True)

    def hidden(
        self, token_ids_T: torch.Tensor, kv: KVView, meta: AttentionMeta, rows_R: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, but for the head: hidden states after the final norm [R, E], in the model's dtype."""
        cos_TD, sin_TD = self.rope.rows(meta.positions_T)
        step = StepContext(kv=kv, meta=meta, cos_TD=cos_TD, sin_TD=sin_TD)
        residual_TE = self.embedding(token_ids_T)
        x_TE = rms_norm(residual_TE, self.first_norm_E, self.eps)
        for layer in self.layers[:-1]:
            heads_TF = layer.attention.attend(x_TE, step)
            x_TE, residual_TE = self._finish(layer, heads_TF, residual_TE)
        return self._last(x_TE, residual_TE, step, rows_R)

    def _finish(
        self, layer: DecoderLayer, heads_TF: torch.Tensor, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer after its attention, up to the next norm: (normed x, residual)."""
        x_TE = layer.attention.project(heads_TF)
        x_TE, residual_TE = add_rms_norm(x_TE, residual_TE, layer.mlp_norm_E, self.eps)
        return add_rms_norm(layer.mlp(x_TE), residual_TE, layer.next_norm_E, self.eps)

    def _last(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, step: StepContext, rows_R: torch.Tensor
    ) -> torch.Tensor:
        """The last layer and the final norm; past the cache write only the wanted rows are computed."""
        layer = self.layers[-1]
        heads_TF = layer.attention.attend(x_TE, step)
        if rows_R.numel() == 0:
            return x_TE[:0]
        if rows_R.numel() < heads_TF.shape[0]:
            heads_TF, residual_TE = select_rows(heads_TF, rows_R), select_rows(residual_TE, rows_R)
        return self._finish(layer, heads_TF, residual_TE)[0]
