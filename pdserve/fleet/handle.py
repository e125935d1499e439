"""The fleet as its owner sees it: start the controller, or find it, and ask. Blocking; needs a joined Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from pdserve.errors import BY_LABEL, ConfigError, InternalError, PdserveError, Unavailable
from pdserve.fleet.controller import FleetController
from pdserve.fleet.placement import control_options, remove_group
from pdserve.fleet.spec import FleetSpec, controller_name
from pdserve.fleet.store import forget_wanted, running_workers
from pdserve.types import Role

Status = dict[str, Any]

CALL_TIMEOUT_S = 30.0
OWNER_GONE_S = 5.0
"""An owner asks every second; one that was silent for so long has died, and another may take over."""
MAX_FAILURES = 3
"""A worker that failed this often in a row without ever serving is given up by who waits for it."""
_FINAL = {"model_error", "config_error", "incompatible", "unknown_model", "never_fits"}
"""Errors of a start that another try will not cure."""


class FleetHandle:
    """Speaks with the controller. Every method may raise Unavailable when the controller does not answer."""

    def __init__(self, controller: Any, fleet: str = "", *, owner: bool = False) -> None:
        """fleet: its name. owner: this is who started it, and who has to ask again and again."""
        self._controller = controller
        self._fleet, self._owner = fleet, owner
        self.ending = False
        """Whether `shutdown` has begun."""
        self._over = False

    @classmethod
    def start(cls, spec: FleetSpec) -> FleetHandle:
        """Starts the controller, detached. Where a fleet of that name is left by an owner who died, this one
        takes it over if it is as wanted, and drains and replaces it if not.

        Raises ConfigError if the cluster has a fleet of that name with a living owner, or with none.
        """
        import ray

        found = _find(spec.name)
        if found is not None and cls(found, spec.name)._inherit(spec):
            return cls(found, spec.name, owner=True)
        controller = (
            ray.remote(FleetController)
            .options(
                name=controller_name(spec.name),
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=100,
                **control_options(ray.cluster_resources()),
            )
            .remote(spec.to_json())
        )
        return cls(controller, spec.name, owner=True)

    @classmethod
    def find(cls, fleet: str = "") -> FleetHandle:
        """The fleet of that name in the joined cluster. Raises Unavailable if there is none."""
        controller = _find(fleet)
        if controller is None:
            raise Unavailable("this cluster runs no pdserve fleet" + (" of that name" if fleet else ""))
        return cls(controller, fleet)

    def _inherit(self, spec: FleetSpec) -> bool:
        """Whether a dead owner's fleet is ours from now on; if not, it has ended. Raises ConfigError."""
        silent = float(self._get(self._controller.silent_s.remote()))
        if 0 <= silent < OWNER_GONE_S:
            time.sleep(OWNER_GONE_S - silent)
            silent = float(self._get(self._controller.silent_s.remote()))
        if silent < OWNER_GONE_S:
            raise ConfigError(
                "fleet_name: this cluster runs a pdserve fleet of that name already; stop that one first"
                if spec.name
                else "ray_address: this cluster runs a pdserve fleet already; stop that one first, "
                "or give this one a fleet_name"
            )
        if self._get(self._controller.adopt.remote(spec.to_json())):
            return True
        self.shutdown(spec.drain_timeout_s)
        return False

    def status(self) -> Status:
        """Wanted counts, and each worker's state, record, restarts and last error."""
        return _parsed(self._get(self._controller.status.remote()))

    def next_status(self, timeout_s: float, *, patient: bool = True) -> Status:
        """The status after the next change, or after the time given. patient: through a controller's restart;
        who asks again anyway need not be, and Ray prints a line for each call that it would try again."""
        method = self._controller.wait_changed
        asked = (method if patient else method.options(max_task_retries=0)).remote(timeout_s, self._owner)
        return _parsed(self._get(asked, timeout_s + CALL_TIMEOUT_S))

    def wait_serving(self, timeout_s: float, on_change: Callable[[Status], None] = lambda _: None) -> Status:
        """Returns when every wanted worker serves. Raises the error of a start that will not succeed."""
        deadline = time.monotonic() + timeout_s
        status = self.status()
        while not status["all_serving"]:
            on_change(status)
            _raise_final(status)
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable("the workers did not serve in time; their logs say why")
            status = self.next_status(min(left, 0.5))
        on_change(status)
        return status

    def scale(self, role: Role, count: int) -> Status:
        """Wants `count` workers of a role; returns at once with the status."""
        return _parsed(self._get(self._controller.scale.remote(str(role), count)))

    def drain(self, worker_id: str) -> bool:
        """Drains and ends one worker, and wants one fewer. False: no such worker. Returns at once."""
        return bool(self._get(self._controller.drain.remote(worker_id)))

    def move(self, worker_id: str, timeout_s: float) -> bool:
        """Drains and ends one worker while another takes its part elsewhere; returns when it has ended.
        False: no such worker, or it is ending already."""
        return bool(self._get(self._controller.move.remote(worker_id), timeout_s))

    def settings(self, worker_id: str) -> dict[str, Any]:
        """The settings in force in a worker's process."""
        return _parsed(self._get(self._controller.settings.remote(worker_id)))

    def shutdown(self, drain_timeout_s: float) -> bool:
        """Drains and ends all workers, then the controller. True: all running work was finished.

        Safe to call twice.
        """
        if self._over:
            return True
        self.ending = True
        try:
            patience = drain_timeout_s + CALL_TIMEOUT_S
            drained = bool(self._get(self._controller.shutdown.remote(drain_timeout_s), patience))
        finally:
            # Also when the drain was cut short: workers are detached and would outlive us.
            self._end()
        self._over = True
        return drained

    def abandon(self) -> None:
        """There is nobody left to shut down: `shutdown` does nothing from now on."""
        self._over = True

    def _end(self) -> None:
        import ray

        forget_wanted(self._fleet)
        ray.kill(self._controller, no_restart=True)
        for worker_id, _, actor in running_workers(self._fleet):
            ray.kill(actor, no_restart=True)
            remove_group(worker_id)

    def _get(self, ref: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        import ray

        try:
            return ray.get(ref, timeout=timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ConnectionError):
            raise Unavailable("the fleet controller does not answer", retry_after_s=1.0) from None
        except ray.exceptions.RayTaskError as err:
            raise InternalError("the fleet controller could not do this") from err


def _find(fleet: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(controller_name(fleet))
    except ValueError:
        return None


def _parsed(text: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    return value


def _raise_final(status: Status) -> None:
    for slot in status["workers"]:
        error = slot["error"]
        if error and (error["label"] in _FINAL or slot["failures"] >= MAX_FAILURES):
            kind: type[PdserveError] = BY_LABEL[error["label"]]
            raise kind(f"{slot['worker_id']}: {error['message']}")
