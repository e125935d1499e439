"""One rank as a process without Ray: `python -m pdserve.ranks < config.json`, started by its leader."""

from __future__ import annotations

import logging
import os
import sys

from pdserve import failpoints
from pdserve.errors import WorkerLost
from pdserve.ranks.config import RankConfig
from pdserve.ranks.member import EXIT_LOST, serve_rank


def main() -> None:
    """Ends the process with the rank's status, at once: torch's threads have nothing to finish."""
    failpoints.require_allowed()
    try:
        config = RankConfig.from_json(sys.stdin.read())
        config.log()
        status = serve_rank(config)
    except WorkerLost:
        status = EXIT_LOST
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
