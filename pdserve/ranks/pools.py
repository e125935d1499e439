"""The page pools of all ranks of a replica, as its leader has them mapped.

What lives here: which memory belongs to which rank. What does not: page states (the leader's page manager:
all ranks use the same page ids), moving bytes, the layouts' meaning.

    page p of the replica = page p of rank 0's pool (KV heads of rank 0) and page p of rank 1's … : every rank
    writes its own during a step; between steps the leader may read and write all of them
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.runner import page_layout
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.models.config import ModelConfig
from pdserve.models.sharded import shard_config
from pdserve.parallel.shards import shards


def rank_layouts(
    config: ModelConfig, size: int, *, page_size: int, dtype: str, repeated: bool = False
) -> tuple[PageLayout, ...]:
    """The page layout of every rank: its KV heads only, or all of them. Raises ConfigError."""
    if repeated:
        return (page_layout(config, page_size=page_size, dtype=dtype),) * size
    return tuple(
        page_layout(shard_config(config, shard), page_size=page_size, dtype=dtype)
        for shard in shards(config, size)
    )


def pages_within(layouts: Sequence[PageLayout], memory_bytes: int) -> int:
    """How many pages fit where each takes one page of every rank."""
    return memory_bytes // sum(layout.stride_bytes for layout in layouts)


class ReplicaPools:
    """Pools by rank; the leader's own is the first. Control thread, movers and compute thread may read it."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        """pools: of equal page counts. The first is closed by whoever made it."""
        self._pools = tuple(pools)

    @property
    def num_ranks(self) -> int:
        return len(self._pools)

    @property
    def num_pages(self) -> int:
        """Pages of every pool."""
        return self._pools[0].num_pages

    @property
    def by_rank(self) -> tuple[KVPool, ...]:
        """The pools themselves."""
        return self._pools

    def layout(self, rank: int) -> PageLayout:
        """How a rank's pages are laid out."""
        return self._pools[rank].layout

    def page_view(self, rank: int, page: int) -> memoryview:
        """A rank's part of a page, writable. Raises Incompatible for a page that there is not."""
        return self._pools[rank].page_view(page)

    def page_address(self, rank: int, page: int) -> int:
        """Where it lies in this process. Raises Incompatible."""
        return self._pools[rank].page_address(page)

    def set_generation(self, page: int, generation: int) -> None:
        """Writes the page's generation into every pool; before any new byte of that page."""
        for pool in self._pools:
            pool.set_generation(page, generation)

    def close(self) -> None:
        """Unmaps the other ranks' pools."""
        for pool in self._pools[1:]:
            pool.close()
