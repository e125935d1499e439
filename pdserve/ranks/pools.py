"""The page pools of all ranks of a replica, as its leader has them mapped.

What lives here: which memory belongs to which rank. What does not: page states (the leader's page manager:
all ranks use the same page ids), moving bytes, the layouts' meaning.

    page p of the replica = page p of rank 0's pool (KV heads of rank 0) and page p of rank 1's … : every rank
    writes its own during a step; between steps the leader may read and write all of them

Where each rank has sequences of its own, pages are whole and there is one pool, the leader's; all map it:

    page p of the replica = page p of that pool: during a step the rank writes it that is its home (`homes`)
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from pdserve.config.worker import WorkerConfig
from pdserve.engine.runner import page_layout
from pdserve.errors import ConfigError, WorkerLost
from pdserve.kvcache.homes import Homes
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.models.config import ModelConfig
from pdserve.models.sharded import shard_config
from pdserve.parallel.shards import shards
from pdserve.ranks.frames import Frame, Kind


def rank_layouts(config: WorkerConfig, model: ModelConfig) -> tuple[PageLayout, ...]:
    """The page layout of every rank: its KV heads only, or all of them. Raises ConfigError."""
    size, dtype = config.page_size, config.dtype
    if config.rank_attention != "divided":
        return (page_layout(model, page_size=size, dtype=dtype),) * config.tp
    return tuple(
        page_layout(shard_config(model, shard), page_size=size, dtype=dtype)
        for shard in shards(model, config.tp)
    )


def pool_pages(config: WorkerConfig, layouts: Sequence[PageLayout]) -> int:
    """Pages of the worker: of every rank's pool, or of the one that they divide. Raises ConfigError where a
    sequence could not have two."""
    homes = config.num_homes
    each = (config.num_pages or pages_within(layouts, config.kv_memory_bytes) * homes) // homes
    if each < 2:
        raise ConfigError(
            "kv_memory: too small for two KV pages of this model"
            + (" on each rank" if homes > 1 else "")
            + "; give more memory"
        )
    return each * homes


def pages_within(layouts: Sequence[PageLayout], memory_bytes: int) -> int:
    """How many pages fit where each takes one page of every rank."""
    return memory_bytes // sum(layout.stride_bytes for layout in layouts)


def own_pool(layout: PageLayout, num_pages: int) -> KVPool:
    """A rank's pool, which its leader adopts."""
    pool = KVPool.create(layout, num_pages, secrets.randbits(64), shared=True)
    pool.prefault()
    return pool


def divided_pool(layout: PageLayout, homes: Homes, pool_id: int) -> KVPool:
    """The leader's pool, which the other ranks join. Each backs its own pages with memory, near itself."""
    pool = KVPool.create(layout, homes.num_pages, pool_id, shared=True)
    pool.prefault(homes.pages(0))
    return pool


def joined_pool(frame: Frame, layout: PageLayout, homes: Homes, rank: int) -> KVPool:
    """The pool of a leader's POOL frame, with our part backed by memory. Raises WorkerLost."""
    if frame.kind is not Kind.POOL or frame.fd is None:
        raise WorkerLost("the replica's leader is out of step")
    pool = KVPool.join(frame.fd, layout, int(json.loads(frame.body)))
    pool.prefault(homes.pages(rank))
    return pool


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
