"""What one rank's process needs to know. It gets there as JSON, on standard input or through Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdserve.config.codec import from_json, to_json
from pdserve.config.fields import setting
from pdserve.config.worker import WorkerConfig
from pdserve.obs.logging import log_as


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Configuration of one rank, made by its leader."""

    worker: str = setting(help="The worker's configuration as JSON, without the fleet's secret.")
    rank: int = setting(help="Which rank; the leader is 0.", minimum=1)
    directory: str = setting(help="The replica's private directory.")
    token: str = setting(help="Hex of the random bytes that all ranks of a replica share.", secret=True)

    @classmethod
    def of(cls, worker: WorkerConfig, rank: int, directory: Path, token: str) -> RankConfig:
        """For a rank of this worker."""
        plain = dataclasses.replace(worker, fleet_secret="", routers=())
        return cls(worker=plain.to_json(), rank=rank, directory=str(directory), token=token)

    @property
    def worker_config(self) -> WorkerConfig:
        """The worker's configuration."""
        return WorkerConfig.from_json(self.worker)

    @property
    def socket_path(self) -> Path:
        """The leader's Unix socket."""
        return socket_path(Path(self.directory))

    @property
    def meeting(self) -> Path:
        """The file in which the process group's ranks meet."""
        return meeting(Path(self.directory))

    def log(self) -> None:
        """Sets the logging of the rank's process up."""
        worker = self.worker_config
        log_as(worker, "rank", worker=worker.worker_id, role=worker.role, rank=self.rank)

    def to_json(self) -> str:
        """As one JSON object, for the rank's process only."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> RankConfig:
        """The inverse. Raises ConfigError naming the field."""
        return from_json(cls, text)


def socket_path(directory: Path) -> Path:
    """Where the leader listens."""
    return directory / "ranks.sock"


def meeting(directory: Path) -> Path:
    """Where the process group meets."""
    return directory / "meet"


class RankProcess(Protocol):
    """A rank's process as its leader started it."""

    def ended(self) -> bool:
        """Whether it is known to be over."""
        ...

    def kill(self) -> None:
        """Ends it at once, stopped or not. Safe to call twice."""
        ...


Launch = Callable[[RankConfig], RankProcess]
"""Starts a rank's process; returns at once."""
