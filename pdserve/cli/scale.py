"""`pdserve scale`: more or fewer workers of a running fleet, without a restart of it."""

from __future__ import annotations

import time

from pdserve.fleet.cluster import joined_ray, ray_here
from pdserve.fleet.handle import FleetHandle, Status
from pdserve.fleet.supervise import SlotState
from pdserve.types import Role

EXIT_OK, EXIT_NOT_YET = 0, 1
LOOK_EVERY_S = 0.5


def run(role: Role, count: int, fleet_name: str, ray_address: str, timeout_s: float) -> int:
    """Returns when exactly so many workers of the role serve and those over have ended, 1 if that took too
    long; it goes on then. Raises PdserveError."""
    with joined_ray(ray_address or ray_here()):
        fleet = FleetHandle.find(fleet_name)
        status = fleet.scale(role, count)
        deadline = time.monotonic() + timeout_s
        told = ""
        while not _reached(status, role, count):
            if time.monotonic() >= deadline:
                print("not there yet; the fleet goes on", flush=True)
                return EXIT_NOT_YET
            if told != (told := _doing(status, role)):
                print(told, flush=True)
            status = fleet.next_status(LOOK_EVERY_S)
    print(f"{count} {role} serving", flush=True)
    return EXIT_OK


def _states(status: Status, role: Role) -> list[str]:
    return [str(slot["state"]) for slot in status["workers"] if slot["role"] == role]


def _reached(status: Status, role: Role, count: int) -> bool:
    return _states(status, role) == [SlotState.SERVING] * count


def _doing(status: Status, role: Role) -> str:
    """Such as "decode: 1 serving, 1 starting"."""
    states = _states(status, role)
    return f"{role}: " + ", ".join(f"{states.count(s)} {s}" for s in SlotState if s in states)
