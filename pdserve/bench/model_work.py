"""How much a built model reads and computes, for `floors`: dense decoders whose layers are one call."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.bench.floors import Product, Work
from pdserve.kernels.linear import Linear, PackedLinear
from pdserve.kernels.quant_linear import QuantLinear
from pdserve.kvcache.layout import PageLayout
from pdserve.layers.attention import Attention
from pdserve.layers.mlp import GatedMLP
from pdserve.models.config import ModelConfig
from pdserve.models.decoder import Decoder, DecoderLayer


def work_of(decoder: Decoder, config: ModelConfig, layout: PageLayout) -> Work | None:
    """None for models whose work is not known: mixtures, latent attention, windows."""
    if config.experts is not None or config.latent is not None or any(config.windows):
        return None
    last = len(decoder.layers) - 1
    products = [p for i, layer in enumerate(decoder.layers) for p in _layer(layer, i == last)]
    return Work(
        products=(*products, _product("head", decoder.head, wanted_only=True)),
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        kv_kind=layout.dtype,
        kv_token_bytes=layout.page_bytes / layout.page_size,
    )


def _layer(layer: DecoderLayer, last: bool) -> Iterator[Product]:
    """Past its attention, the last layer computes wanted rows alone."""
    assert isinstance(layer.attention, Attention)
    assert isinstance(layer.mlp, GatedMLP)
    yield _product("qkv", layer.attention.qkv)
    yield _product("out", layer.attention.out, wanted_only=last)
    yield _product("gate_up", layer.mlp.gate_up, wanted_only=last)
    yield _product("down", layer.mlp.down, wanted_only=last)


def _product(phase: str, linear: Linear, wanted_only: bool = False) -> Product:
    assert isinstance(linear, PackedLinear | QuantLinear)
    size_bytes = linear.weight.numel() * linear.weight.element_size()
    kind = "int8" if isinstance(linear, QuantLinear) else str(linear.dtype).removeprefix("torch.")
    return Product(
        phase=phase,
        kind=kind,
        size=linear.num_out * linear.num_in,
        size_bytes=size_bytes,
        wanted_only=wanted_only,
    )
