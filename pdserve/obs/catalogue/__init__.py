"""Every metric that a process of ours serves, as data: name, kind, what it says, labels and buckets.

Here: declarations (`router`, `worker`, `fleet`, `vllm`, `process`), which need no package. Not here: what
counts (`pdserve.obs.metrics`, and each process). Dashboards, alerts, charts and docs/metrics.md take names
from here.
"""

from __future__ import annotations

from pdserve.obs.catalogue.fleet import FLEET
from pdserve.obs.catalogue.kinds import Kind, Label, Metric
from pdserve.obs.catalogue.process import PROCESS
from pdserve.obs.catalogue.router import ROUTER
from pdserve.obs.catalogue.vllm import VLLM_ROUTER, VLLM_WORKER
from pdserve.obs.catalogue.worker import WORKER

__all__ = ["BY_NAME", "FLEET", "PROCESS", "ROUTER", "VLLM_ROUTER", "VLLM_WORKER", "WORKER"]
__all__ += ["Kind", "Label", "Metric"]

BY_NAME: dict[str, Metric] = {
    metric.name: metric for metric in (*ROUTER, *WORKER, *FLEET, *PROCESS, *VLLM_ROUTER, *VLLM_WORKER)
}
"""All metrics by the name they are asked for (a counter's ends in `_total`)."""
