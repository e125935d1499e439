"""Fleets of stand-in workers, and waiting for what they should become."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pdserve.config import ServeConfig, resolve
from pdserve.fleet.handle import FleetHandle, Status
from pdserve.fleet.spec import FleetSpec
from pdserve.types import Role

STANDIN = "tests.support.standin_host:StandinHost"
LIMIT_S = 60.0


def make_spec(
    run_dir: Path, counts: dict[str, int], *, model: str = "standin", min_backoff_s: float = 0.2
) -> FleetSpec:
    """A fleet of stand-ins with these counts by role."""
    flags: dict[str, object] = {"model": model, "threads": 2, **counts}
    serve = resolve(ServeConfig, flags=flags).config.resolved()
    return FleetSpec(
        wanted=serve.wanted(),
        templates={
            role: serve.worker(role, secret="ab" * 32, routers=(), run_dir=str(run_dir)) for role in Role
        },
        min_backoff_s=min_backoff_s,
        worker_host=STANDIN,
    )


def pids(status: Status) -> dict[str, int]:
    """Process of each worker that serves."""
    return {slot["worker_id"]: slot["record"]["pid"] for slot in status["workers"] if slot["record"]}


def until(handle: FleetHandle, wanted: Callable[[Status], object]) -> Status:
    """Follows the fleet's changes until the status is as wanted."""
    deadline = time.monotonic() + LIMIT_S
    status = handle.status()
    while not wanted(status):
        assert time.monotonic() < deadline, status
        status = handle.next_status(1.0)
    return status
