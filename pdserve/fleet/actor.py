"""The Ray actor around one worker: settings of its process, then the host does the work.

Only JSON text and numbers cross. No request, token or KV byte passes here. The host is loaded by name, so
that this module (and the fleet) never imports an engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pdserve.config import WorkerConfig
from pdserve.config.serve import NODE_HOST
from pdserve.errors import InternalError, PdserveError
from pdserve.fleet.nice import raise_nice
from pdserve.fleet.rank_actor import launch_rank
from pdserve.garbage import keep_what_is_loaded
from pdserve.obs.logging import log_as
from pdserve.types import WorkerRecord

T = TypeVar("T")
log = logging.getLogger("pdserve.fleet")

EXIT_RETIRED = 75
"""The process's status when its incarnation declared itself over (also in pdserve.worker.host)."""
RETIRE_S = 0.5
"""Time for the controller to hear of it."""


class Host(Protocol):
    """What runs inside a worker's process (`pdserve.worker.host.WorkerHost`). One thread calls it."""

    def start(self) -> WorkerRecord:
        """Blocks until the worker serves. Raises PdserveError."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Takes no new work; blocks until the running work is done (True) or time is up (False)."""
        ...

    def stop(self) -> None:
        """Ends everything. May be called in any state, also twice."""
        ...

    def settings(self) -> dict[str, Any]:
        """Process settings as they are in force: pid, nice, OMP variables, compute threads."""
        ...


class WorkerActor:
    """One worker process. Ray calls the methods; they run side by side on the actor's event loop."""

    def __init__(self, config_json: str, worker_host: str) -> None:
        config = WorkerConfig.from_json(config_json)
        log_as(config, "worker", worker=config.worker_id, role=config.role)
        raise_nice(config.nice)
        host = _node_address() if config.host == NODE_HOST else config.host
        # The nice value is in force for every thread now; the host must not add it again.
        self._config = dataclasses.replace(config, nice=0, host=host)
        self._worker_host = worker_host
        self._host: Host | None = None
        self._note = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host")
        self._answer: asyncio.Task[str] | None = None
        self._over: asyncio.Future[str] | None = None

    async def start(self) -> str:
        """Starts the host, once. JSON: {"record": …} when it serves, or {"error": {label, message}}.

        Asked again (by a restarted controller) it gives the same answer.
        """
        self._end_of_life()
        if self._answer is None:
            self._answer = asyncio.create_task(self._in_thread(self._start))
        return await asyncio.shield(self._answer)

    async def note(self) -> str:
        """What the start is busy with, in words."""
        return self._note

    async def lifetime(self) -> str:
        """The reason when this incarnation declares itself over; the process then ends with status 75. Else
        it never returns: the caller learns of the process's death by the failure of this call."""
        return await asyncio.shield(self._end_of_life())

    def _end_of_life(self) -> asyncio.Future[str]:
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def _retired(self, reason: str) -> None:
        """Any thread. The core is silent from now on; the controller has a moment to hear why."""
        assert self._over is not None
        self._over.get_loop().call_soon_threadsafe(self._over.set_result, reason)
        threading.Timer(RETIRE_S, os._exit, (EXIT_RETIRED,)).start()

    async def drain(self, timeout_s: float) -> bool:
        """See Host.drain. True when there is no host to drain."""
        if self._host is None:
            return True
        return await self._in_thread(self._host.drain, timeout_s)

    async def stop(self) -> None:
        """See Host.stop."""
        if self._host is not None:
            await self._in_thread(self._host.stop)

    async def settings(self) -> str:
        """See Host.settings, as JSON."""
        if self._host is None:
            return json.dumps({"pid": os.getpid()})
        return json.dumps(await self._in_thread(self._host.settings))

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _set_note(self, note: str) -> None:
        self._note = note

    def _start(self) -> str:
        try:
            self._host = load_host(self._worker_host, self._config, self._set_note, self._retired)
            record = self._host.start()
            keep_what_is_loaded()
            return json.dumps({"record": dataclasses.asdict(record)})
        except PdserveError as err:
            log.exception("worker %s can not start", self._config.worker_id)
            return json.dumps({"error": {"label": err.label, "message": err.message}})
        except Exception:
            log.exception("worker %s can not start", self._config.worker_id)
            text = "the worker failed while it started; its log says why"
            return json.dumps({"error": {"label": InternalError.label, "message": text}})


def load_host(
    worker_host: str,
    config: WorkerConfig,
    progress: Callable[[str], None],
    on_retire: Callable[[str], None],
) -> Host:
    """Makes the host named "module:Class". progress: takes a few words on what its start is busy with.
    on_retire: called once, from any thread, when the worker's incarnation is over. A worker of several ranks
    gets a way to start the others."""
    module, _, name = worker_host.partition(":")
    progress("loading libraries")
    ranks = {"launch": launch_rank} if config.tp > 1 else {}
    host: Host = getattr(importlib.import_module(module), name)(
        config, progress=progress, on_retire=on_retire, **ranks
    )
    return host


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
