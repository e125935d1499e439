"""Ranks as children of the leader's process: how a worker without Ray starts them."""

from __future__ import annotations

import os
import subprocess
import sys

from pdserve.parallel.shards import thread_share
from pdserve.ranks.config import RankConfig


class RankChild:
    """A `RankProcess` that is our child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ended(self) -> bool:
        """See RankProcess."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """See RankProcess. Waits until it is gone, so that no zombie is left."""
        self._process.kill()
        self._process.wait()


def launch_child(config: RankConfig) -> RankChild:
    """Starts `python -m pdserve.ranks` with its share of the threads."""
    worker = config.worker_config
    threads = str(thread_share(worker.threads, worker.tp, config.rank))
    environ = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve.ranks"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environ
    )
    assert process.stdin is not None
    process.stdin.write(config.to_json().encode())
    process.stdin.close()
    return RankChild(process)
