"""What a fleet should look like, as JSON for the controller's creation arguments, and the names it uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.config import WorkerConfig
from pdserve.types import Role

NAMESPACE = "pdserve"
CONTROLLER_NAME = "pdserve-fleet"
WORKER_RESOURCE = "pdserve_worker"
"""Custom resource of the nodes we start. It limits nothing; it marks where workers may be placed."""
RESOURCE_SHARE = 0.001
WORKER_HOST = "pdserve.worker.host:WorkerHost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Wanted workers by role, and the configuration the workers of each role share.

    start_timeout_s: a worker that does not serve by then is replaced. drain_timeout_s: how long a worker
    that has to go may finish what runs. min_backoff_s, max_backoff_s: between tries of the same worker.
    resource_share: how much of its node's worker resource each worker takes; 1.0 gives each a node.
    worker_host: "module:Class" with the interface of WorkerHost; only tests name another one.
    """

    wanted: Mapping[Role, int]
    templates: Mapping[Role, WorkerConfig]
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0
    min_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    resource_share: float = RESOURCE_SHARE
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


def actor_name(worker_id: str) -> str:
    """Name of a worker's Ray actor."""
    return f"pdserve-worker-{worker_id}"


def group_name(worker_id: str) -> str:
    """Name of a worker's placement group."""
    return f"pdserve-place-{worker_id}"
