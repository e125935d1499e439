"""A worker host without an engine, for tests of the fleet: it starts at once and tells what it runs with."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.config import WorkerConfig
from pdserve.errors import ModelError
from pdserve.types import CapabilityRecord, ModelLimits, PeerRef, WorkerRecord


class StandinHost:
    """The interface of WorkerHost. The model's name says what happens at start: fail, die, or serve."""

    def __init__(
        self, config: WorkerConfig, *, progress: Callable[[str], None], on_retire: Callable[[str], None]
    ) -> None:
        self._config = config
        self._on_retire = on_retire
        progress("standing in")

    def start(self) -> WorkerRecord:
        """Notes the start in a file of the run directory, then does what the model's name says."""
        starts = Path(self._config.run_dir) / self._config.worker_id
        with starts.open("a") as log:
            log.write(f"start {os.getpid()}\n")
        if self._config.model == "broken":
            raise ModelError("the model file can not be used")
        if self._config.model == "dies":
            os._exit(3)
        if self._config.model == "retires" and len(starts.read_text().splitlines()) == 1:
            threading.Timer(0.3, self._on_retire, ("it stood still",)).start()
        return WorkerRecord(
            peer=PeerRef(worker_id=self._config.worker_id, incarnation=2**64 - 1, control="127.0.0.1:1"),
            role=self._config.role,
            capability=CapabilityRecord(
                layout="", numerics="", model="", tokenizer="", dtype="", page_size=1, page_bytes=1,
                transports=self._config.transports,
            ),
            limits=ModelLimits(vocab_size=1, max_context=1, end_token_ids=(), bos_token_id=None),
            model_name=self._config.model,
            pool_pages=1,
            page_size=1,
            pid=os.getpid(),
        )  # fmt: skip

    def drain(self, timeout_s: float) -> bool:
        """Notes that it was asked, so that a test sees the order."""
        with (Path(self._config.run_dir) / self._config.worker_id).open("a") as log:
            log.write(f"drain {os.getpid()}\n")
        return True

    def stop(self) -> None:
        """Notes that it was asked."""
        with (Path(self._config.run_dir) / self._config.worker_id).open("a") as log:
            log.write(f"stop {os.getpid()}\n")

    def settings(self) -> dict[str, Any]:
        """What the process runs with, and the node it is on."""
        import ray

        return {
            "pid": os.getpid(),
            "nice": os.nice(0),
            "thread_nices": sorted(
                {os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")}
            ),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
            "auth_mode": os.environ.get("RAY_AUTH_MODE", ""),
            "gcs_patience_s": dict(os.environ).get("RAY_gcs_rpc_server_reconnect_timeout_s", ""),
            "node": ray.get_runtime_context().get_node_id(),
        }
