"""A real worker that stood still for too long ends its incarnation, with the status that says so."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from pdserve.config.worker import WorkerConfig
from pdserve.types import Role
from pdserve.worker.engine import LEAST_GAP_S
from pdserve.worker.host import EXIT_RETIRED
from tests.support import tiny_models


def test_a_worker_stopped_for_longer_than_its_lease_is_another_one_afterwards(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.llama(), tmp_path / "model")
    config = WorkerConfig(
        worker_id="w", role=Role.DECODE, model=str(model), fleet_secret=secrets.token_hex(32),
        dtype="float32", num_pages=16, threads=1, lease_s=1.0,
    )  # fmt: skip
    worker = subprocess.Popen(
        [sys.executable, "-m", "pdserve.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(config.to_json().encode())
        worker.stdin.close()
        assert worker.stdout.readline()
        for stopped_s, status in ((LEAST_GAP_S / 2, None), (LEAST_GAP_S + 1.0, EXIT_RETIRED)):
            worker.send_signal(signal.SIGSTOP)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(stopped_s)
            worker.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(3.0 if status is None else 30.0)
            assert worker.poll() == status
    finally:
        worker.kill()
        worker.wait()
