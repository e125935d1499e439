"""A worker as a process of its own that a test can ask about itself (`python -m` this module).

The first line on standard input is its configuration; one JSON line comes back once it serves. Then "status"
is answered by a JSON line, and "stop" or the end of the input ends it. What lives here: that loop; everything
else is the production's `WorkerHost`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from pdserve.config.worker import WorkerConfig
from pdserve.worker.host import WorkerHost


def main() -> None:
    """Serves until told to stop."""
    host = WorkerHost(WorkerConfig.from_json(sys.stdin.readline()))
    record = host.start()
    print(json.dumps({"pid": record.pid, "peer": asdict(record.peer)}), flush=True)
    for line in sys.stdin:
        if line.strip() == "stop":
            break
        print(json.dumps(host.status()), flush=True)
    host.stop()


if __name__ == "__main__":
    main()
