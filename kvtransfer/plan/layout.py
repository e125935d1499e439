"""What all pages of a replica look like: page size, dtype, inner order, which layers have a part, and who has
which KV heads. Data only.

What lives here: the description, its checks, sizes. What does not: how one layout becomes another
(`relayout`), the order inside a part (`order`), which rank gets which heads (whoever builds the replica says
so), pool memory.

A page of rank r holds, for each layer that has KV of its own, the parts of the inner order (K, then V), each
of heads(r) x page_size x head_dim elements: [stored layer, part, inner order].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.plan.order import Part, parse_order
from pdserve.kvcache.layout import DTYPE_BYTES, PageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What KV a layer has. window: positions that a query sees, itself among them; 0 is all. shares: the
    earlier layer whose KV it reuses (then it has no part, and its window is no matter of storage); None has
    its own."""

    window: int = 0
    shares: int | None = None


FULL = LayerKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """Pages of all ranks of a replica, which use the same page ids.

    page_size: tokens per page. inner: tag of the order (`order`). layers: one kind per layer. ranks: for each
    rank the KV heads in its pages, as ranges in the order in which they lie; a head may be on several ranks.
    Raises ValueError where that is no layout.
    """

    page_size: int
    head_dim: int
    num_kv_heads: int
    dtype: str
    inner: str
    layers: tuple[LayerKind, ...]
    ranks: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        for name in ("page_size", "head_dim", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}")
        self._check_layers()
        self._check_ranks()
        for part in self.parts:
            self._check_part(part)

    @classmethod
    def of(
        cls, pages: PageLayout, ranks: Iterable[range], layers: Iterable[LayerKind] | None = None
    ) -> ReplicaLayout:
        """The layout of a replica. pages: as if one rank had all heads. ranks: the KV heads of each. layers:
        None is full attention everywhere, each layer with KV of its own."""
        latent = any(part.of_all_heads for part in parse_order(pages.inner))
        return cls(
            page_size=pages.page_size,
            head_dim=pages.head_dim * (2 if latent else 1),  # a latent row lies where K and V would
            num_kv_heads=pages.num_kv_heads,
            dtype=pages.dtype,
            inner=pages.inner,
            layers=(FULL,) * pages.num_layers if layers is None else tuple(layers),
            ranks=tuple((heads,) for heads in ranks),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a layer, in the order in which they lie."""
        return parse_order(self.inner)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def stored(self) -> tuple[int, ...]:
        """The layers that have KV of their own, in the order of the page."""
        return tuple(number for number, kind in enumerate(self.layers) if kind.shares is None)

    def home(self, layer: int) -> int:
        """The layer whose KV a layer uses: its own or another's."""
        shares = self.layers[layer].shares
        return layer if shares is None else shares

    def heads(self, rank: int) -> tuple[int, ...]:
        """The KV heads of a rank, in the order of its pages."""
        return tuple(head for heads in self.ranks[rank] for head in heads)

    def sizes(self, rank: int) -> dict[str, int]:
        """Length of each axis of a rank's parts."""
        return {"h": len(self.heads(rank)), "s": self.page_size, "d": self.head_dim}

    def part_elems(self, rank: int) -> int:
        """Elements of one part."""
        return math.prod(self.sizes(rank).values())

    def page_elems(self, rank: int) -> int:
        """Elements of a page's payload."""
        return len(self.stored) * len(self.parts) * self.part_elems(rank)

    def page_bytes(self, rank: int) -> int:
        """Bytes of a page's payload."""
        return self.page_elems(rank) * self.dtype_bytes

    def rank_pages(self, rank: int) -> PageLayout:
        """A rank's pages as its pool has them."""
        latent = any(part.of_all_heads for part in self.parts)
        return PageLayout(
            num_layers=len(self.stored),
            num_kv_heads=len(self.heads(rank)),
            head_dim=self.head_dim // (2 if latent else 1),
            page_size=self.page_size,
            dtype=self.dtype,
            inner=self.inner,
        )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def _check_layers(self) -> None:
        if not self.stored:
            raise ValueError("a layout needs a layer with KV of its own")
        for number, kind in enumerate(self.layers):
            if kind.window < 0:
                raise ValueError(f"layer {number} has a negative window")
            shares = kind.shares
            if shares is not None and not (0 <= shares < number and self.layers[shares].shares is None):
                raise ValueError(f"layer {number} must share the KV of an earlier layer that has its own")

    def _check_ranks(self) -> None:
        if not self.ranks or any(not self.heads(rank) for rank in range(len(self.ranks))):
            raise ValueError("a layout needs ranks, and each of them a KV head")
        for rank in range(len(self.ranks)):
            heads = self.heads(rank)
            if any(one.step != 1 for one in self.ranks[rank]):
                raise ValueError("ranges of KV heads must have step 1")
            if len(set(heads)) != len(heads):
                raise ValueError(f"rank {rank} has a KV head twice")
        found = {head for rank in range(len(self.ranks)) for head in self.heads(rank)}
        if found != set(range(self.num_kv_heads)):
            raise ValueError(f"the ranks must hold KV heads 0 to {self.num_kv_heads - 1}, all and no others")

    def _check_part(self, part: Part) -> None:
        if part.of_all_heads and self.num_kv_heads != 1:
            raise ValueError(f"{self.inner!r} has rows of all heads, so num_kv_heads must be 1")
        for rank in range(len(self.ranks)):
            for axis, size in self.sizes(rank).items():
                if size % part.tile(axis):
                    raise ValueError(
                        f"{self.inner!r} cuts {axis} by {part.tile(axis)}, which does not divide {size}"
                    )
