"""One worker process: the control thread with its event loop, the compute thread, gRPC, membership.

What lives here: starting, stopping and draining in the right order. What does not: decisions (`core`, the
roles), effects (`driver`), Ray (`pdserve.fleet`); this class runs just as well without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from pdserve import clock, failpoints
from pdserve.config.worker import WorkerConfig
from pdserve.errors import InternalError
from pdserve.ranks.children import launch_child
from pdserve.ranks.config import Launch
from pdserve.types import WorkerRecord
from pdserve.worker.engine import Engine, RankOptions, build_engine
from pdserve.worker.serving import Serving

T = TypeVar("T")
log = logging.getLogger(__name__)

EXIT_CORE_FAILED = 70
EXIT_RETIRED = 75
"""This incarnation is over and nothing is wrong with the worker: start it again at once."""


def _quit(error: BaseException) -> None:
    """The core's state can not be trusted: this process ends, the fleet starts a new incarnation."""
    logging.shutdown()
    os._exit(EXIT_CORE_FAILED)


def _retired(reason: str) -> None:
    """The core says nothing any more. What ends here is what others have given up already."""
    logging.shutdown()
    os._exit(EXIT_RETIRED)


async def _end_tasks() -> None:
    """Cancels what is left on the loop (gRPC's own stream tasks) and waits for it."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class WorkerHost:
    """A worker in this process. Its methods are for the one thread that made it; they block."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        progress: Callable[[str], None] = log.info,
        on_fatal: Callable[[BaseException], None] = _quit,
        on_retire: Callable[[str], None] = _retired,
        launch: Launch = launch_child,
    ) -> None:
        """Starts nothing yet. on_fatal: called when the pure core failed; on_retire: when it declares this
        incarnation over, or a rank is lost, with the reason. Both end the process by default. launch: starts
        the other ranks, where there are any.

        Raises ConfigError if faults are asked for outside of tests.
        """
        failpoints.require_allowed()
        clock.skew(failpoints.setting("clock_offset"), failpoints.setting("clock_rate"))
        self._config = config
        self._progress = progress
        self._on_fatal = on_fatal
        self._on_retire = on_retire
        self._launch = launch
        self._own_dir = "" if config.run_dir else tempfile.mkdtemp(prefix=f"pdserve-{os.getpid()}-worker-")
        self._run_dir = config.run_dir or self._own_dir
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._loop = clock.new_event_loop()
        self._control = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._engine: Engine | None = None
        self._serving: Serving | None = None

    def start(self) -> WorkerRecord:
        """Loads, listens and registers; returns when requests are served.

        Raises ModelError or ConfigError with a sentence; nothing is left running then.
        """
        if self._config.nice:
            os.nice(self._config.nice)
        try:
            ranks = RankOptions(launch=self._launch, on_lost=self._on_retire)
            self._engine = self._compute.submit(
                build_engine, self._config, self._run_dir, self._progress, ranks
            ).result()
            self._control.start()
            self._serving = self._call(self._serve(self._engine))
        except BaseException:
            self.stop()
            raise
        return self._serving.record

    def drain(self, timeout_s: float) -> bool:
        """Takes no new requests; True when the live ones ended within the limit (seconds)."""
        if self._serving is None:
            return True
        return self._call(self._serving.drain(timeout_s)) == 0

    def stop(self) -> None:
        """Ends everything, running requests included. Safe to call twice."""
        if self._serving is not None:
            self._call(self._serving.stop())
            self._serving = None
        self._compute.shutdown(wait=True)
        if self._control.is_alive():
            self._call(_end_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._control.join()
        if not self._loop.is_closed() and not self._control.is_alive():
            self._loop.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._own_dir:
            shutil.rmtree(self._own_dir, ignore_errors=True)

    def settings(self) -> dict[str, Any]:
        """What the process really runs with, for those who check: pid, nice, thread and OpenMP settings."""
        return {
            "pid": os.getpid(),
            "weights": self._engine.config.weights if self._engine else "",
            "nice": os.nice(0),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
            "torch_num_threads": torch.get_num_threads(),
            "cpus": len(os.sched_getaffinity(0)),
        }

    def status(self) -> dict[str, Any]:
        """Load, counters and integrity, for tests and the fleet."""
        if self._serving is None:
            raise InternalError("the worker is not serving")
        return self._call(self._serving.describe())

    async def _serve(self, engine: Engine) -> Serving:
        serving = Serving(engine, self._compute, self._on_fatal, self._on_retire)
        await serving.start()
        return serving

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()
