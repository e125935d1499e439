"""The fleet as its owner sees it: start the controller, or find it, and ask. Blocking; needs a joined Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from pdserve.errors import BY_LABEL, ConfigError, InternalError, PdserveError, Unavailable
from pdserve.fleet.controller import FleetController
from pdserve.fleet.placement import remove_group
from pdserve.fleet.spec import CONTROLLER_NAME, FleetSpec
from pdserve.fleet.store import forget_wanted, running_workers
from pdserve.types import Role

Status = dict[str, Any]

CALL_TIMEOUT_S = 30.0
MAX_FAILURES = 3
"""A worker that failed this often in a row without ever serving is given up by who waits for it."""
_FINAL = {"model_error", "config_error", "incompatible", "unknown_model", "never_fits"}
"""Errors of a start that another try will not cure."""


class FleetHandle:
    """Speaks with the controller. Every method may raise Unavailable when the controller does not answer."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._over = False

    @classmethod
    def start(cls, spec: FleetSpec) -> FleetHandle:
        """Starts the controller, detached. Raises ConfigError if the cluster has a fleet already."""
        import ray

        if _find() is not None:
            raise ConfigError("ray_address: this cluster runs a pdserve fleet already; stop that one first")
        controller = (
            ray.remote(FleetController)
            .options(
                name=CONTROLLER_NAME,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=100,
            )
            .remote(spec.to_json())
        )
        return cls(controller)

    @classmethod
    def find(cls) -> FleetHandle:
        """The fleet of the joined cluster. Raises Unavailable if there is none."""
        controller = _find()
        if controller is None:
            raise Unavailable("this cluster runs no pdserve fleet")
        return cls(controller)

    def status(self) -> Status:
        """Wanted counts, and each worker's state, record, restarts and last error."""
        return _parsed(self._get(self._controller.status.remote()))

    def next_status(self, timeout_s: float) -> Status:
        """The status after the next change, or after the time given."""
        return _parsed(self._get(self._controller.wait_changed.remote(timeout_s), timeout_s + CALL_TIMEOUT_S))

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

    def settings(self, worker_id: str) -> dict[str, Any]:
        """The settings in force in a worker's process."""
        return _parsed(self._get(self._controller.settings.remote(worker_id)))

    def shutdown(self, drain_timeout_s: float) -> bool:
        """Drains and ends all workers, then the controller. True: all running work was finished.

        Safe to call twice.
        """
        if self._over:
            return True
        try:
            patience = drain_timeout_s + CALL_TIMEOUT_S
            drained = bool(self._get(self._controller.shutdown.remote(drain_timeout_s), patience))
        finally:
            # Also when the drain was cut short: workers are detached and would outlive us.
            self._end()
        self._over = True
        return drained

    def _end(self) -> None:
        import ray

        forget_wanted()
        ray.kill(self._controller, no_restart=True)
        for worker_id, _, actor in running_workers():
            ray.kill(actor, no_restart=True)
            remove_group(worker_id)

    def _get(self, ref: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        import ray

        try:
            return ray.get(ref, timeout=timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            raise Unavailable("the fleet controller does not answer", retry_after_s=1.0) from None
        except ray.exceptions.RayTaskError as err:
            raise InternalError("the fleet controller could not do this") from err


def _find() -> Any | None:
    import ray

    try:
        return ray.get_actor(CONTROLLER_NAME)
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
