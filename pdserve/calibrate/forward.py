"""A dense decoder in plain float32 torch, layer by layer, whose linears can be watched and replaced.

What lives here: the forward pass for calibration and for measuring quality. What does not: serving (that is
`pdserve.models.decoder`, whose results this is held to), choosing codes.

Legend: B sequences, T tokens, E hidden size, H query heads, K KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from pdserve.errors import ModelError
from pdserve.kernels.norm import rms_norm_reference
from pdserve.layers.rope import RopeTable
from pdserve.models.config import ModelConfig
from pdserve.models.weights import HEAD
from pdserve.quant.kv import KVForm

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[M, K] to [M, N], without the bias."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Causal attention of q [B, T, H, D] over k and v [B, T, K, D] with a window (0: all positions): as q."""
Tap = Callable[[str, torch.Tensor], None]
"""Called with a linear's weight name and its input [M, K], before it runs."""


def require_dense(config: ModelConfig) -> None:
    """Raises ModelError for a model whose layers this can not compute."""
    if config.experts is not None or config.latent is not None or config.qk_norm_whole:
        raise ModelError("Only dense models with plain attention can be quantised so far.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDecoder:
    """weights: by Hugging Face name, any float type. linears: what computes a weight's product instead of it.
    kv: the cache's form, None for exact. attend: another attention, with a cache of its own; None for exact.
    Raises ModelError for a model that is not dense.
    """

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    linears: Mapping[str, Linear] = field(default_factory=dict)
    kv: KVForm | None = None
    attend: Attend | None = None

    def __post_init__(self) -> None:
        require_dense(self.config)

    def embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, E] before the first layer."""
        return self.weights["model.embed_tokens.weight"][tokens_BT].to(torch.float32)

    def hidden(
        self, tokens_BT: torch.Tensor, watch: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """[B, T, E], normed, ready for the head. watch: called with the residual after each layer."""
        x_BTE = self.embed(tokens_BT)
        for layer in range(self.config.num_layers):
            x_BTE = self.layer(layer, x_BTE)
            if watch is not None:
                watch(x_BTE)
        return self._norm(x_BTE, "model.norm.weight")

    def logits(self, x_ME: torch.Tensor) -> torch.Tensor:
        """[M, V] of normed rows."""
        if HEAD in self.linears or not self.config.tied_embeddings:
            return self._product(HEAD, x_ME, None)
        return x_ME @ self.weights["model.embed_tokens.weight"].to(torch.float32).T

    def layer(self, layer: int, x_BTE: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        """The residual after one layer."""
        prefix = f"model.layers.{layer}."
        x_BTE = x_BTE + self._attention(layer, self._norm(x_BTE, f"{prefix}input_layernorm.weight"), tap)
        inner = self._norm(x_BTE, f"{prefix}post_attention_layernorm.weight")
        gate = self._linear(f"{prefix}mlp.gate_proj", inner, tap)
        up = self._linear(f"{prefix}mlp.up_proj", inner, tap)
        hidden = torch.nn.functional.silu(gate) * up
        return x_BTE + self._linear(f"{prefix}mlp.down_proj", hidden, tap)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm_reference(x, self.weights[name].to(torch.float32), self.config.rms_norm_eps)

    def _linear(self, stem: str, x_BTF: torch.Tensor, tap: Tap | None) -> torch.Tensor:
        name = f"{stem}.weight"
        x_MK = x_BTF.reshape(-1, x_BTF.shape[-1])
        out_MN = self._product(name, x_MK, tap)
        bias = self.weights.get(f"{stem}.bias")
        if bias is not None:
            out_MN = out_MN + bias.to(torch.float32)
        return out_MN.view(*x_BTF.shape[:-1], -1)

    def _product(self, name: str, x_MK: torch.Tensor, tap: Tap | None) -> torch.Tensor:
        if tap is not None:
            tap(name, x_MK)
        linear = self.linears.get(name)
        return x_MK @ self.weights[name].to(torch.float32).T if linear is None else linear(x_MK)

    def _attention(self, layer: int, x_BTE: torch.Tensor, tap: Tap | None) -> torch.Tensor:
        c, stem = self.config, f"model.layers.{layer}.self_attn."
        heads = x_BTE.shape[:2]
        q = self._linear(f"{stem}q_proj", x_BTE, tap).view(*heads, c.num_heads, c.head_dim)
        k = self._linear(f"{stem}k_proj", x_BTE, tap).view(*heads, c.num_kv_heads, c.head_dim)
        v = self._linear(f"{stem}v_proj", x_BTE, tap).view(*heads, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self._norm(q, f"{stem}q_norm.weight"), self._norm(k, f"{stem}k_norm.weight")
        if c.clip_qkv is not None:
            q, k, v = (part.clamp(-c.clip_qkv, c.clip_qkv) for part in (q, k, v))
        q, k = _rotate(q, k, c)
        if self.kv is not None:
            k, v = self.kv.fake(k), self.kv.fake(v)
        out_BTHD = (self.attend or attend_exactly)(q, k, v, c.windows[layer])
        return self._linear(f"{stem}o_proj", out_BTHD.reshape(*heads, -1), tap)


def attend_exactly(q_BTHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """The attention of `Attend` in float32, over keys and values as they are."""
    _, tokens, num_heads, _ = q_BTHD.shape
    out_BHTD = torch.nn.functional.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2), _wide(k, num_heads), _wide(v, num_heads), attn_mask=_mask(tokens, window)
    )
    return out_BHTD.transpose(1, 2)


def _wide(rows_BTKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, H, T, D]: each KV head for all its query heads."""
    copies = num_heads // rows_BTKD.shape[2]
    return rows_BTKD.repeat_interleave(copies, dim=2).transpose(1, 2)


def _mask(tokens: int, window: int) -> torch.Tensor:
    """[T, T]: what a token sees."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    return (distance >= 0) & ((distance < window) if window else True)


def _rotate(
    q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    cos_TD, sin_TD = RopeTable(config.rope).rows(torch.arange(q_BTHD.shape[1]))

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos_TD[:, None] + torch.cat((-high, low), dim=-1) * sin_TD[:, None]

    return turned(q_BTHD), turned(k_BTKD)
