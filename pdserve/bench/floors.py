"""The least time a step can take: bytes over measured bandwidth, operations over measured peak. Pure.

What lives here: how much a dense decoder's step reads and computes, by phase, and the floor of that. What
does not: measuring (`peaks`, `engine`), where the sizes come from (`model_work`).

Phases follow one another, so a step's floor is the sum of its phases' floors, and a phase's the greater of
the two. Weights and pages are counted; activations are not (they stay in caches), nor is what is neither a
product nor attention: its floor is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ATTENTION = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """products: operations a second, by data type (two for a multiplication and an addition); 0 where the
    CPU has no such products. bandwidth: (bytes that are read again and again, bytes a second), by size.
    """

    products: Mapping[str, float]
    bandwidth: Sequence[tuple[int, float]]

    def operations(self, kind: str) -> float:
        """Operations a second on numbers of this kind, by the faster of their own products and, for
        bfloat16, those of float32 (widening is a shift).
        """
        found = self.products[kind]
        return max(found, self.products["float32"]) if kind == "bfloat16" else found

    def bytes_per_s(self, size_bytes: int) -> float:
        """Bandwidth for so many bytes that are read once a step: that of the largest size measured that is
        not larger, as caches keep smaller ones better. What more bytes got, fewer would get too.
        """
        sizes = [size for size, _ in self.bandwidth]
        fitting = max((size for size in sizes if size <= size_bytes), default=min(sizes))
        return max(speed for size, speed in self.bandwidth if size >= fitting)

    def best_with(self, other: Peaks) -> Peaks:
        """The better of two measurements of one machine, figure by figure: other work only takes away."""
        products = {kind: max(speed, other.products[kind]) for kind, speed in self.products.items()}
        pairs = zip(self.bandwidth, other.bandwidth, strict=True)
        return Peaks(products=products, bandwidth=tuple((s, max(a, b)) for (s, a), (_, b) in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A linear layer. phase: of the step (`kernels.stack.PHASES`). kind: data type of its operations. size:
    inputs times outputs. size_bytes: of its weight. wanted_only: computed for rows whose logits are wanted.
    """

    phase: str
    kind: str
    size: int
    size_bytes: int
    wanted_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What each step of a model needs. kv_kind: data type of attention. kv_token_bytes: keys and values of a
    token, over all layers.
    """

    products: Sequence[Product]
    num_layers: int
    num_heads: int
    head_dim: int
    kv_kind: str
    kv_token_bytes: float

    @property
    def weight_bytes(self) -> int:
        """Bytes of all linear layers."""
        return sum(p.size_bytes for p in self.products)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One step. queries: new tokens by sequence; contexts: tokens with them. wanted: rows with logits."""

    queries: Sequence[int]
    contexts: Sequence[int]
    wanted: int

    @property
    def visible(self) -> int:
        """Pairs of a new token and one that it sees."""
        pairs = zip(self.queries, self.contexts, strict=True)
        return sum(n * (2 * context - n + 1) // 2 for n, context in pairs)


def floor_seconds(work: Work, steps: Iterable[Rows], peaks: Peaks) -> dict[str, float]:
    """Least seconds by phase, over all steps."""
    total: dict[str, float] = {}
    for rows in steps:
        for phase, seconds in _step(work, rows, peaks).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def _step(work: Work, rows: Rows, peaks: Peaks) -> Mapping[str, float]:
    kv_bytes = work.kv_token_bytes * sum(rows.contexts)
    speed = peaks.bytes_per_s(int(work.weight_bytes + kv_bytes))
    found: dict[str, float] = {}
    for product in work.products:
        count = rows.wanted if product.wanted_only else sum(rows.queries)
        if count:
            computing = 2 * count * product.size / peaks.operations(product.kind)
            least = max(product.size_bytes / speed, computing)
            found[product.phase] = found.get(product.phase, 0.0) + least
    operations = 4 * rows.visible * work.num_heads * work.head_dim * work.num_layers
    found[ATTENTION] = max(kv_bytes / speed, operations / peaks.operations(work.kv_kind))
    return found


def share(floor: float, measured: float) -> float:
    """How much of what is possible is achieved: 1 at the floor."""
    return floor / measured if measured > 0 else 0.0
