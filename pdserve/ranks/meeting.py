"""How a replica's ranks get their group: shared memory, whose descriptor the leader sends, or gloo."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.config.worker import WorkerConfig
from pdserve.engine.numerics import numerics_id
from pdserve.errors import WorkerLost
from pdserve.parallel.group import GroupConfig, TorchGroup, open_group
from pdserve.parallel.shm_group import ShmGroup
from pdserve.parallel.surviving_group import SurvivingGroup

RankGroup = TorchGroup | ShmGroup | SurvivingGroup


def joint_numerics(config: WorkerConfig) -> str:
    """The numerics id of the worker's ranks, before they have a runner."""
    if config.rank_attention != "divided":  # nothing is added or divided but experts
        return numerics_id(dtype=config.dtype, deterministic=config.deterministic, ranks=1, exchange="")
    return numerics_id(
        dtype=config.dtype, deterministic=config.deterministic, ranks=config.tp, exchange=config.rank_exchange
    )


def meet(config: WorkerConfig, rank: int, meeting: Path, fd: int | None) -> RankGroup:
    """The group of this rank. meeting: the file where gloo's ranks meet. fd: the shared memory's, used up
    here; None for gloo. Blocks until all are there (gloo). Raises WorkerLost."""
    if config.rank_exchange != "shm":
        return open_group(
            GroupConfig(rank=rank, size=config.tp, meeting=meeting, backend=config.rank_exchange)
        )
    if fd is None:
        raise WorkerLost("a rank of this replica is out of step")
    try:
        kind = SurvivingGroup if config.attention_repeated else ShmGroup
        return kind(fd, rank=rank, size=config.tp)
    finally:
        os.close(fd)
