"""What a fleet should look like, as JSON for the controller's creation arguments, and the names it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.config import WorkerConfig
from pdserve.types import Role

NAMESPACE = "pdserve"
CONTROLLER_NAME = "pdserve-fleet"
"""Name of the actor of a fleet without a name."""
WORKER_RESOURCE = "pdserve_worker"
"""Custom resource of the nodes we start. It limits nothing; it marks where workers may be placed."""
CONTROL_RESOURCE = "pdserve_control"
"""Custom resource of nodes that are there for controllers, where a cluster has any."""
RESOURCE_SHARE = 0.001
WORKER_HOST = "pdserve.worker.host:WorkerHost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Wanted workers by role, and the configuration the workers of each role share.

    start_timeout_s: a worker that does not serve by then is replaced. drain_timeout_s: how long a worker
    that has to go may finish what runs. min_backoff_s, max_backoff_s: between tries of the same worker.
    resource_share: how much of its node's worker resource each worker takes; 1.0 gives each a node.
    exclusive_nodes: each worker takes the whole of a node that offers its role's resource.
    name: of the fleet, where a cluster runs several. owner_lease_s: without a word from who started the fleet
    for so long, it drains and ends; 0: it outlives its owner.
    worker_host: "module:Class" with the interface of WorkerHost; only tests name another one.
    """

    wanted: Mapping[Role, int]
    templates: Mapping[Role, WorkerConfig]
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0
    min_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    resource_share: float = RESOURCE_SHARE
    exclusive_nodes: bool = False
    name: str = ""
    owner_lease_s: float = 0.0
    worker_host: str = WORKER_HOST

    def to_json(self) -> str:
        """As one JSON object, secrets included: for actor arguments only."""
        return json.dumps(
            {
                "wanted": dict(self.wanted),
                "templates": {role: config.to_json() for role, config in self.templates.items()},
                "start_timeout_s": self.start_timeout_s,
                "drain_timeout_s": self.drain_timeout_s,
                "min_backoff_s": self.min_backoff_s,
                "max_backoff_s": self.max_backoff_s,
                "resource_share": self.resource_share,
                "exclusive_nodes": self.exclusive_nodes,
                "name": self.name,
                "owner_lease_s": self.owner_lease_s,
                "worker_host": self.worker_host,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> FleetSpec:
        """The inverse of to_json. The text comes from our own processes only."""
        raw = json.loads(text)
        raw["wanted"] = {Role(role): int(count) for role, count in raw["wanted"].items()}
        raw["templates"] = {
            Role(role): WorkerConfig.from_json(config) for role, config in raw["templates"].items()
        }
        return cls(**raw)


def controller_name(fleet: str) -> str:
    """Name of a fleet's controller."""
    return f"{CONTROLLER_NAME}-{fleet}" if fleet else CONTROLLER_NAME


_WORKER = re.compile(rf"(?:(?P<fleet>.+)-)?(?P<role>{'|'.join(Role)})-[0-9]+")


def fleet_and_role(worker_id: str) -> tuple[str, Role]:
    """The name of a worker's fleet, and its role. Raises ValueError for what is no worker id of ours."""
    found = _WORKER.fullmatch(worker_id)
    if found is None:
        raise ValueError("no worker id of a fleet")
    return found["fleet"] or "", Role(found["role"])


def role_resource(role: Role) -> str:
    """Custom resource of nodes that are there for one role."""
    return f"pdserve_{role}"


def actor_name(worker_id: str) -> str:
    """Name of a worker's Ray actor."""
    return f"pdserve-worker-{worker_id}"


def group_name(worker_id: str) -> str:
    """Name of a worker's placement group."""
    return f"pdserve-place-{worker_id}"
