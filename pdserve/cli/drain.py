"""`pdserve drain`: moves the workers of a Ray node elsewhere, before the node goes."""

from __future__ import annotations

import contextlib
import threading
import time

from pdserve.errors import InternalError, Unavailable
from pdserve.fleet.cluster import joined_ray, ray_here
from pdserve.fleet.handle import FleetHandle
from pdserve.fleet.nodes import close_node, this_node
from pdserve.fleet.placement import workers_on
from pdserve.fleet.spec import fleet_and_role

EXIT_OK, EXIT_LEFT = 0, 1
LOOK_EVERY_S = 0.5


def run(node: str, ray_address: str, timeout_s: float) -> int:
    """Returns when no worker is left on the node, 1 if that took too long. Raises PdserveError.

    node: its id in hex; empty: the one we are on."""
    with joined_ray(ray_address or ray_here()):
        node = node or this_node()
        if not close_node(node, timeout_s):
            print("Ray did not take the node out of service; a new worker may start here", flush=True)
        deadline = time.monotonic() + timeout_s
        moving: dict[str, threading.Thread] = {}
        while left := workers_on(node):
            for worker_id in sorted(set(left) - moving.keys()):
                print(f"draining {worker_id}", flush=True)
                moving[worker_id] = threading.Thread(target=_move, args=(worker_id, timeout_s), daemon=True)
                moving[worker_id].start()
            if time.monotonic() >= deadline:
                print(f"still here: {', '.join(left)}", flush=True)
                return EXIT_LEFT
            time.sleep(LOOK_EVERY_S)
    print(f"no worker is left on the node; {len(moving)} drained", flush=True)
    return EXIT_OK


def _move(worker_id: str, timeout_s: float) -> None:
    """Has the worker's fleet move it; one whose fleet is gone, or ending it, is waited for by the caller."""
    with contextlib.suppress(Unavailable, InternalError):
        FleetHandle.find(fleet_and_role(worker_id)[0]).move(worker_id, timeout_s)
