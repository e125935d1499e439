"""`pdserve router`: one router process, alone or as the child of `pdserve up`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any, cast

from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from router.config import RouterConfig
    from router.main import Router


def run(config: object, parent: int, ready_fd: int) -> int:
    """Serves until SIGTERM or SIGINT, drains, returns the exit code.

    parent: pid to end with, or 0. ready_fd: descriptor to tell {"address", "metrics_port", "http_url"} or
    {"error"} on, or -1. Raises PdserveError.
    """
    from pdserve.obs.logging import log_as
    from router.main import serve

    if parent:
        from pdserve.fleet.processes import die_with_parent

        die_with_parent(parent)
    settings = cast("RouterConfig", config)
    log_as(settings, "router")

    def listening(router: Router) -> None:
        print(f"router listens on {router.address}", flush=True)
        if router.http_url:
            print(f"HTTP API on {router.http_url}/v1", flush=True)
        if router.metrics_url:
            print(f"metrics on {router.metrics_url}/metrics", flush=True)
        told = {"address": router.address, "metrics_port": router.metrics_port, "http_url": router.http_url}
        _tell(ready_fd, told)

    try:
        asyncio.run(serve(settings, on_listening=listening))
    except PdserveError as err:
        if ready_fd < 0:
            raise
        _tell(ready_fd, {"error": {"label": err.label, "message": err.message}})
        return 1
    return 0


def _tell(ready_fd: int, message: dict[str, Any]) -> None:
    if ready_fd >= 0:
        with os.fdopen(ready_fd, "w", closefd=True) as pipe:
            pipe.write(json.dumps(message) + "\n")
