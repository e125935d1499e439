"""Which form of weights a worker computes with where nobody named one: a pure choice, and one sentence why.

What lives here: the names and the rule, over facts as data. What does not: finding the facts
(`pdserve.models.facts`, `pdserve.kernels.build`), weights themselves (`pdserve.models.precision`).

Prefill is bound by arithmetic, decode by memory: with "fast" the one takes 8 bits, the other the 4 bits of a
checkpoint that has them. What makes up for a choice is measured: docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.types import Role

EXACT, FAST = "exact", "fast"
PRECISIONS = (EXACT, FAST)
WEIGHTS = ("exact", "w8a8", "w4a8")
STRICT, RELAXED = "strict", "relaxed"
KV_MIXING = (STRICT, RELAXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the choice needs to know of a model. stored_bits: of most of its linears' codes as kernels can
    take them, 0 for plain numbers. experts, latent: it has a mixture of experts, latent attention. head_dim:
    of its attention, in elements."""

    stored_bits: int = 0
    head_dim: int = 64
    experts: bool = False
    latent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """kernels: there are some for this machine. byte_products: they have VPDPBUSD (VNNI); without it products
    of bytes are widened first."""

    kernels: bool = True
    byte_products: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What was asked of a worker. weights: a form, or None for what suits."""

    role: Role
    precision: str = EXACT
    weights: str | None = None
    kv_mixing: str = RELAXED
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """weights: one of WEIGHTS. why: a part of a sentence, for people. int8_pages: 8-bit KV pages suit too."""

    weights: str
    why: str
    int8_pages: bool = False


def choose(wish: Wish, model: ModelFacts, cpu: CpuFacts) -> Choice:
    """What a worker computes with. A form that was asked for is taken as it is. Pages are chosen by what
    prefill and decode have in common: they exchange them."""
    pages = wish.precision == FAST and cpu.byte_products and not _hindrance(wish, model, cpu)
    return replace(_weights(wish, model, cpu), int8_pages=pages and model.head_dim % 4 == 0)


def _weights(wish: Wish, model: ModelFacts, cpu: CpuFacts) -> Choice:
    if wish.weights is not None:
        return Choice(weights=wish.weights, why="asked for")
    if wish.precision == EXACT:
        return Choice(weights=EXACT, why="precision is exact")
    hindrance = _hindrance(wish, model, cpu)
    if hindrance:
        return Choice(weights=EXACT, why=hindrance)
    if wish.role is not Role.DECODE:
        return Choice(weights="w8a8", why="prompts are bound by arithmetic, of which 8 bits need least")
    return _decode(wish, model, cpu)


def _hindrance(wish: Wish, model: ModelFacts, cpu: CpuFacts) -> str:
    """Why nothing but exact weights will do; empty where others do."""
    if not cpu.kernels:
        return "there are no kernels of 8 bits for this CPU"
    if model.latent:
        return "latent attention (MLA) has exact weights only"
    if model.experts:
        return "a mixture of experts has exact weights only"
    return "workers of several ranks have exact weights only" if wish.ranks > 1 else ""


def _decode(wish: Wish, model: ModelFacts, cpu: CpuFacts) -> Choice:
    if wish.kv_mixing == STRICT:
        return Choice(weights="w8a8", why="kv_mixing is strict: the same as prefill")
    if model.stored_bits != 4:
        return Choice(weights="w8a8", why="tokens are bound by memory, and the checkpoint has no 4-bit codes")
    if not cpu.byte_products:
        return Choice(weights="w8a8", why="without VNNI 4 bits are no faster than 8")
    return Choice(weights="w4a8", why="tokens are bound by memory, and the checkpoint has 4-bit codes")


def mixing(given: str | None, prefill: str | None, decode: str | None) -> str:
    """kv_mixing where it was not given. prefill, decode: their forms as asked for, None where each worker
    chooses: then they may differ."""
    if given is not None:
        return given
    return STRICT if prefill == decode and prefill is not None else RELAXED
