"""Numerics of a quantised KV cache: one scale for each head, page and part (K or V), as a plain reference.
With pages of one token the scales are those of `--kv-dtype int8`: one for each head and token.

What lives here: fake quantisation of keys (after RoPE, as pages hold them) and values. What does not: the
layout of quantised pages and kernels that read them (`pdserve.kernels.kv_view`), which also round queries.

A scale is max |x| over the page's rows of the head, over the greatest value of the type (127, 448, 57344).
Rows of a page that are not written yet do not count.

Legend: B sequences, T tokens, K KV heads, D head dim, P pages, S tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.errors import ConfigError
from pdserve.quant.float8 import FLOAT8, largest, to_float8

TINY = 2.0**-100


@dataclass(frozen=True, slots=True, kw_only=True)
class KVForm:
    """kind: int8, e4m3 or e5m2. page_size: tokens that share a scale. Raises ConfigError for others."""

    kind: str = "int8"
    page_size: int = 16

    def __post_init__(self) -> None:
        if self.kind not in ("int8", *FLOAT8) or self.page_size < 1:
            raise ConfigError("kv: must be int8, e4m3 or e5m2, on pages of at least one token")

    def fake(self, rows_BTKD: torch.Tensor) -> torch.Tensor:
        """float32: what a cache of this form would give back."""
        batch, tokens, heads, dim = rows_BTKD.shape
        padding = -tokens % self.page_size
        padded = torch.nn.functional.pad(rows_BTKD.to(torch.float32), (0, 0, 0, 0, 0, padding))
        pages = padded.view(batch, -1, self.page_size, heads, dim)
        greatest = 127.0 if self.kind == "int8" else largest(FLOAT8[self.kind])
        scale = pages.abs().amax(dim=(2, 4), keepdim=True) / greatest
        scale = torch.where(scale < TINY, 1.0, scale)
        codes = pages / scale
        if self.kind == "int8":
            codes = codes.round().clamp(-127, 127)
        else:
            codes = to_float8(codes, FLOAT8[self.kind]).to(torch.float32)
        return (codes * scale).view(batch, -1, heads, dim)[:, :tokens]
