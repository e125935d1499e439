"""Runs one worker in this process without Ray: `python -m pdserve.worker < config.json`.

The configuration comes on standard input, because it holds the fleet secret. Prints one JSON line once it
serves; SIGTERM or SIGINT drains it and ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from pdserve.config.worker import WorkerConfig
from pdserve.errors import PdserveError
from pdserve.garbage import keep_what_is_loaded
from pdserve.obs.logging import log_as
from pdserve.worker.host import WorkerHost

DRAIN_S = 30.0


def main() -> int:
    """Returns the exit status: 0 after a clean end, 1 when it could not start."""
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    try:
        config = WorkerConfig.from_json(sys.stdin.read())
        log_as(config, "worker", worker=config.worker_id, role=config.role)
        host = WorkerHost(config)
        record = host.start()
        keep_what_is_loaded()
    except PdserveError as error:
        print(f"{error.label}: {error.message}", file=sys.stderr)
        return 1
    peer = record.peer
    line = {"worker_id": peer.worker_id, "control": peer.control, "pid": record.pid, "role": record.role}
    print(json.dumps(line), flush=True)
    done.wait()
    host.drain(DRAIN_S)
    host.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
