"""A rank of a replica as a Ray actor beside its leader, in the same placement group.

What lives here: starting one from the leader's actor, and the actor itself. What does not: a rank's life
(`pdserve.ranks.member`, loaded by name so that the fleet never imports an engine).

The leader's actor owns its ranks' actors: Ray ends them with it, as the ranks do by themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

from pdserve.config import WorkerConfig
from pdserve.fleet.nice import raise_nice
from pdserve.fleet.placement import rank_options

if TYPE_CHECKING:
    from pdserve.ranks.config import RankConfig

_MEMBER = "pdserve.ranks.member"
_CONFIG = "pdserve.ranks.config"


class RankActor:
    """One rank's process. Ray calls `run` once."""

    def __init__(self, config_json: str, nice: int) -> None:
        raise_nice(nice)
        self._config_json = config_json

    def run(self) -> int:
        """Serves until the leader says stop; the rank's exit status. A lost leader ends the process."""
        config = importlib.import_module(_CONFIG).RankConfig.from_json(self._config_json)
        config.log()
        return int(importlib.import_module(_MEMBER).serve_rank(config))


class RankOnRay:
    """A `RankProcess` that is a Ray actor of ours."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._run = actor.run.remote()

    def ended(self) -> bool:
        """See RankProcess."""
        import ray

        ready, _ = ray.wait([self._run], timeout=0)
        return bool(ready)

    def kill(self) -> None:
        """See RankProcess."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it is gone, or Ray is
            ray.kill(self._actor, no_restart=True)


def launch_rank(config: RankConfig) -> RankOnRay:
    """Starts a rank's actor in its worker's placement group. Called inside the leader's actor."""
    import ray

    worker: WorkerConfig = config.worker_config
    options = rank_options(worker, config.rank)
    nice = max(0, os.nice(0))  # as the leader's, which has raised its own
    return RankOnRay(ray.remote(RankActor).options(**options).remote(config.to_json(), nice))
