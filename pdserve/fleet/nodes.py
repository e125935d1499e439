"""The Ray node this process is on: which it is, and taking it out of service."""

from __future__ import annotations

import importlib
import logging
import time

log = logging.getLogger("pdserve.fleet")

_REASON = "pdserve drains this node"


def this_node() -> str:
    """Its id in hex. Needs a Ray that was joined on one of its nodes."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def close_node(node_id: str, seconds: float) -> bool:
    """Nothing new is placed on the node from now on; it ends by itself once it is idle, in so many seconds at
    the latest. False: Ray refused."""
    import ray
    from ray.core.generated import autoscaler_pb2

    context = ray.get_runtime_context()
    try:
        accepted, why = (
            importlib.import_module("ray._raylet")
            .GcsClient(address=context.gcs_address)
            .drain_node(
                node_id,
                autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
                _REASON,
                (time.time_ns() // 1_000_000) + int(seconds * 1000),
            )
        )
    except (ray.exceptions.RayError, RuntimeError) as err:
        log.info("the node can not be closed: %s", type(err).__name__)
        return False
    if not accepted:
        log.info("the node is not closed: %s", why)
    return bool(accepted)
