"""What `pdserve up` and `pdserve fleet` share: Ray, the controller and the workers, with progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from pdserve.cli.phases import Phases
from pdserve.config import ServeConfig
from pdserve.config.addresses import host_port
from pdserve.errors import InternalError, Unavailable
from pdserve.fleet.cluster import joined_ray, local_ray
from pdserve.fleet.handle import FleetHandle, Status
from pdserve.fleet.port import fleet_port
from pdserve.fleet.spec import FleetSpec
from pdserve.fleet.watch import FleetWatch
from pdserve.types import Role

LOG_LINES = 15
OWNER_LEASE_S = 30.0
"""Workers on a cluster end, after their work, when we have died without a word and nobody took over."""


@contextlib.contextmanager
def ray_of(config: ServeConfig, phases: Phases) -> Iterator[Path | None]:
    """A local Ray of ours, or the cluster that was named. Gives the local one's log directory."""
    logs = None
    with contextlib.ExitStack() as stack:
        doing = "joining the cluster" if config.ray_address else "starting a local head, on loopback only"
        with phases.phase("ray", doing):
            if config.ray_address:
                stack.enter_context(joined_ray(config.ray_address))
            else:
                logs = stack.enter_context(local_ray())
        yield logs


@contextlib.contextmanager
def watching(fleet: FleetHandle, config: ServeConfig) -> Iterator[FleetWatch]:
    """Follows the fleet for the time of the block, and serves its port if it is to have one."""
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(FleetWatch(fleet).watching())
        if config.fleet_port is not None:
            port = stack.enter_context(fleet_port(watch, config.fleet_port, config.host))
            url = f"http://{host_port(config.host, port.port)}"
            print(f"the fleet's port: {url}/metrics, /readyz, /livez", flush=True)
        yield watch


@contextlib.contextmanager
def telling_logs(logs: Path | None) -> Iterator[None]:
    """When the block fails for no clear reason, shows the end of what the workers wrote; it goes with Ray."""
    try:
        yield
    except (InternalError, Unavailable):
        for file in sorted(logs.glob("worker-*.err")) if logs else ():
            lines = [x for x in file.read_text("utf-8", "replace").splitlines() if not x.startswith(":")]
            if lines:
                text = "\n".join(["--- a worker's log ends with:", *lines[-LOG_LINES:]])
                print(text, file=sys.stderr, flush=True)
        raise


def start_workers(
    config: ServeConfig, phases: Phases, *, secret: str, routers: tuple[str, ...], run_dir: Path
) -> FleetHandle:
    """Starts the controller. The workers come up on their own; see `wait_workers`."""
    # Workers on other machines make a directory of their own.
    directory = "" if config.ray_address else str(run_dir)
    spec = FleetSpec(
        wanted=config.wanted(),
        templates={
            role: config.worker(role, secret=secret, routers=routers, run_dir=directory) for role in Role
        },
        start_timeout_s=config.start_timeout_s,
        drain_timeout_s=config.drain_timeout_s,
        exclusive_nodes=config.exclusive_nodes,
        name=config.fleet_name,
        # A Ray of our own ends with us anyway.
        owner_lease_s=OWNER_LEASE_S if config.ray_address else 0.0,
    )
    return FleetHandle.start(spec)


def wait_workers(handle: FleetHandle, config: ServeConfig, phases: Phases) -> Status:
    """Returns when all workers serve; tells what they are doing meanwhile. Raises their errors."""
    told: dict[str, str] = {}

    def on_change(status: Status) -> None:
        for slot in status["workers"]:
            text = _doing(slot)
            if told.get(slot["worker_id"]) != text:
                told[slot["worker_id"]] = text
                phases.say(f"  {slot['worker_id']}: {text}")
        phases.tick("  still starting")

    with phases.phase("workers", f"starting {describe(config.wanted())}"):
        return handle.wait_serving(config.start_timeout_s, on_change)


def describe(wanted: dict[Role, int]) -> str:
    """Such as "1 prefill + 2 decode"."""
    return " + ".join(f"{count} {role}" for role, count in wanted.items())


def _doing(slot: dict[str, object]) -> str:
    error = slot["error"]
    if slot["state"] == "waiting" and isinstance(error, dict):
        return f"failed, trying again: {error['message']}"
    return f"{slot['state']}, {slot['note']}" if slot["note"] else str(slot["state"])
