"""What outlives the controller: the wanted counts in the cluster's key-value store, and the named workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.fleet.spec import NAMESPACE, actor_name, controller_name, fleet_and_role
from pdserve.types import Role


def _key(fleet: str) -> str:
    return f"{controller_name(fleet)}-wanted"


def save_wanted(fleet: str, wanted: Mapping[Role, int]) -> None:
    """Keeps the counts for a controller that comes after this one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_key(fleet), json.dumps(dict(wanted)), overwrite=True, namespace=NAMESPACE)


def load_wanted(fleet: str) -> dict[Role, int]:
    """The counts kept last; empty if none were."""
    from ray.experimental import internal_kv

    raw = internal_kv._internal_kv_get(_key(fleet), namespace=NAMESPACE)
    return {Role(role): int(count) for role, count in json.loads(raw).items()} if raw else {}


def forget_wanted(fleet: str) -> None:
    """Removes the counts: the fleet is over."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_key(fleet), namespace=NAMESPACE)


def running_workers(fleet: str) -> list[tuple[str, Role, Any]]:
    """(worker id, role, actor) of every worker of this fleet that Ray knows as alive."""
    import ray

    found = []
    prefix = actor_name("")
    for name in ray.util.list_named_actors():
        if not name.startswith(prefix):
            continue
        worker_id = name.removeprefix(prefix)
        try:
            of, role = fleet_and_role(worker_id)
            if of != fleet:
                continue
            actor = ray.get_actor(name)
        except ValueError:  # died in between, or never was ours
            continue
        found.append((worker_id, role, actor))
    return found
