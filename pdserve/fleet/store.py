"""What outlives the controller: the wanted counts in the cluster's key-value store, and the named workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.fleet.spec import NAMESPACE, actor_name
from pdserve.types import Role

_KEY = "pdserve-fleet-wanted"


def save_wanted(wanted: Mapping[Role, int]) -> None:
    """Keeps the counts for a controller that comes after this one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_KEY, json.dumps(dict(wanted)), overwrite=True, namespace=NAMESPACE)


def load_wanted() -> dict[Role, int]:
    """The counts kept last; empty if none were."""
    from ray.experimental import internal_kv

    raw = internal_kv._internal_kv_get(_KEY, namespace=NAMESPACE)
    return {Role(role): int(count) for role, count in json.loads(raw).items()} if raw else {}


def forget_wanted() -> None:
    """Removes the counts: the fleet is over."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_KEY, namespace=NAMESPACE)


def running_workers() -> list[tuple[str, Role, Any]]:
    """(worker id, role, actor) of every worker of this fleet that Ray knows as alive."""
    import ray

    found = []
    prefix = actor_name("")
    for name in ray.util.list_named_actors():
        if not name.startswith(prefix):
            continue
        worker_id = name.removeprefix(prefix)
        try:
            actor = ray.get_actor(name)
        except ValueError:  # died in between
            continue
        found.append((worker_id, Role(worker_id.rpartition("-")[0]), actor))
    return found
