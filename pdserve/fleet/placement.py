"""Where a worker goes, in Ray's terms: its placement group and the options of its actor."""

from __future__ import annotations

import math
from typing import Any

from pdserve.config import WorkerConfig
from pdserve.fleet.spec import (
    CONTROL_RESOURCE,
    RESOURCE_SHARE,
    WORKER_RESOURCE,
    FleetSpec,
    actor_name,
    group_name,
    role_resource,
)
from pdserve.parallel.shards import thread_share

CALLS_AT_ONCE = 16
"""Methods of one worker actor that may be under way; they wait, they do not compute."""


def bundle(cluster_resources: dict[str, float], share: float) -> dict[str, float]:
    """One replica's bundle. A cluster whose nodes lack our resource gives a sliver of a CPU instead."""
    if WORKER_RESOURCE in cluster_resources:
        return {WORKER_RESOURCE: share}
    return {"CPU": RESOURCE_SHARE}


def rank_share(share: float, num_ranks: int) -> float:
    """One rank's part of its worker's share, in Ray's steps of 1/10,000; never so little that it is none."""
    return max(math.floor(share / num_ranks * 10_000) / 10_000, RESOURCE_SHARE)


def ensure_group(config: WorkerConfig, spec: FleetSpec) -> Any:
    """The worker's placement group: the one it had, or a new one. Outlives its creator.

    Each of the worker's ranks has a bundle with a part of its share, all on one node. On a node of its own
    the worker takes all of the role's resource; a group that no node can hold waits for one.
    """
    import ray

    try:
        return ray.util.get_placement_group(group_name(config.worker_id))
    except ValueError:
        if spec.exclusive_nodes:
            one = {role_resource(config.role): rank_share(1.0, config.tp)}
        else:
            one = bundle(ray.cluster_resources(), rank_share(spec.resource_share, config.tp))
        return ray.util.placement_group(
            [one] * config.tp,
            strategy="STRICT_PACK",
            name=group_name(config.worker_id),
            lifetime="detached",
        )


def workers_on(node_id: str) -> list[str]:
    """Workers of any fleet that have their place on a node. node_id: in hex, as Ray tells it."""
    import ray

    prefix = group_name("")
    return [
        group["name"].removeprefix(prefix)
        for group in ray.util.placement_group_table().values()
        if group["name"].startswith(prefix)
        and group["state"] == "CREATED"
        and node_id in group["bundles_to_node_id"].values()
    ]


def control_options(cluster_resources: dict[str, float]) -> dict[str, Any]:
    """Where a controller goes: to a node that is there for it, in a cluster that has one."""
    if CONTROL_RESOURCE in cluster_resources:
        return {"num_cpus": 0, "resources": {CONTROL_RESOURCE: RESOURCE_SHARE}}
    return {"num_cpus": 0}


def remove_group(worker_id: str) -> None:
    """Gives the worker's place back; no effect if it has none."""
    import ray

    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(group_name(worker_id)))
    except ValueError:
        return


def actor_options(config: WorkerConfig, group: Any) -> dict[str, Any]:
    """Options of a worker's actor, which is also its rank 0."""
    return {
        "name": actor_name(config.worker_id),
        "lifetime": "detached",
        "max_concurrency": CALLS_AT_ONCE,
        **_place(config, group, 0),
    }


def rank_options(config: WorkerConfig, rank: int) -> dict[str, Any]:
    """Options of the actor of another rank of the worker; it ends with the actor that makes it."""
    import ray

    return _place(config, ray.util.get_placement_group(group_name(config.worker_id)), rank)


def _place(config: WorkerConfig, group: Any, rank: int) -> dict[str, Any]:
    """A rank's bundle. Threads and OpenMP's waiting are set before torch loads in the process."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": 0,
        "resources": {name: share for name, share in group.bundle_specs[rank].items() if name != "CPU"},
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank
        ),
        "runtime_env": {"env_vars": thread_variables(thread_share(config.threads, config.tp, rank))},
    }


def thread_variables(threads: int) -> dict[str, str]:
    """Environment of a worker that shares its cores: OpenMP threads sleep while they wait."""
    return {
        # Ray runs its workers at nice 15 unless told otherwise; ours set their own.
        "RAY_worker_niceness": "0",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
