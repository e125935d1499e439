"""The reference page of all metrics, written from their declarations."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.obs.catalogue import FLEET, PROCESS, ROUTER, VLLM_ROUTER, VLLM_WORKER, WORKER
from pdserve.obs.catalogue.kinds import Label, Metric
from pdserve.obs.catalogue.vllm import ROUTER_ALIASES, WORKER_ALIASES, Alias

_HEAD = """# Metrics

Written by `scripts/gen_metrics_docs.py` from the code (`pdserve/obs/catalogue`); do not edit.

Every process serves its metrics as Prometheus text on a port of its own:

| process | port | set by |
|---|---|---|
| router | 9464 | `--metrics-port`; also `/metrics` of the HTTP API, where keys are asked for |
| worker | any free one | `--worker-metrics-port` of `pdserve up` and `pdserve fleet`; routers know it |
| `pdserve fleet`, `pdserve up` | none unless asked for | `--fleet-port` |

**What to scrape.** `GET /targets` on a router's metrics port lists the router, its workers and the fleet
processes of `--fleet-metrics` (`pdserve up` gives it its own), as Prometheus' `http_sd_configs` want it
(`deploy/prometheus/prometheus.yml`); labels are `process` (router, worker, fleet) and, of workers, `worker`
and `role`. Scrape with `honor_labels: true`: series say their role themselves. Neither page asks for
credentials; the port listens where the router does, on loopback by default.

**Names** follow Prometheus' conventions: base units (`_seconds`, `_bytes`, `_ratio` from 0 to 1), counters
end in `_total`, histograms have `_bucket`, `_sum` and `_count`. Every label has a closed set of values, and
every series is there from the start, so that rates and alerts have something to compare with before the
first failure. No label ever holds what a caller wrote.
"""
_ROUTER = """
## Router

Its own requests, and its view of the whole fleet. Each router counts its own requests: add them up. All of
several routers see the same workers: take gauges of workers with `max by`, not `sum by`.

For autoscaling: `pdserve_outstanding_prefill_tokens` (how much work waits for prefill workers) and
`pdserve_kv_utilization_ratio{role="decode"}` (how full decode workers are). Of a prompt that is queued, all
tokens count as uncached; of one that was sent, those that its decode worker had no pages of.

"""
_VLLM = """
## vLLM's names

Served as well with `--vllm-metrics`, for dashboards, autoscalers and endpoint pickers made for vLLM. They
are views of the metrics above at the moment of a scrape; buckets are ours. All but
`vllm:lora_requests_info` have the labels `model_name` and `engine` ("0"). Series begin once the model is
known. The colon is vLLM's; `promtool check metrics` advises against it.

What the Gateway API Inference Extension reads of a model server: `vllm:num_requests_waiting` (queued
requests), `vllm:num_requests_running`, `vllm:kv_cache_usage_perc` (KV cache utilisation),
`vllm:cache_config_info` (`block_size`, `num_gpu_blocks`), and `vllm:lora_requests_info`, which says that
there are no adapters. Point it at routers: a router is the model server of its fleet.

"""


def page() -> str:
    """Markdown of all metrics by process."""
    return "".join(
        [
            _HEAD,
            _ROUTER,
            _table(ROUTER),
            "\n## Worker\n\nEvery series has the label `role`: the worker's own.\n\n",
            _table(WORKER),
            "\n## Fleet process\n\n",
            _table(FLEET),
            "\n## Every process\n\n",
            _table(PROCESS),
            _VLLM,
            _vllm(),
        ]
    )


def _table(metrics: Iterable[Metric]) -> str:
    head = "| metric | kind | labels | what it says |\n|---|---|---|---|\n"
    return head + "".join(_row(metric) for metric in metrics)


def _row(metric: Metric) -> str:
    labels = "; ".join(_label(label) for label in metric.labels) or "-"
    buckets = f" Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}." if metric.buckets else ""
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{buckets} |\n"


def _label(label: Label) -> str:
    if not label.values:
        return f"`{label.name}` (fixed)"
    return f"`{label.name}`: {', '.join(value.replace('<', '&lt;') or '(empty)' for value in label.values)}"


def _vllm() -> str:
    sources = {
        "router": {alias.metric.name: _source(alias) for alias in ROUTER_ALIASES},
        "worker": {alias.metric.name: _source(alias) for alias in WORKER_ALIASES},
    }
    names = dict.fromkeys(metric.name for metric in (*VLLM_ROUTER, *VLLM_WORKER))
    kinds = {metric.name: metric.kind for metric in (*VLLM_WORKER, *VLLM_ROUTER)}
    computed = {metric.name for metric in VLLM_ROUTER} - sources["router"].keys()
    rows = ["| metric | kind | of a router | of a worker |\n|---|---|---|---|\n"]
    for name in names:
        cells = ["computed" if name in computed else sources[process].get(name, "-") for process in sources]
        rows.append(f"| `{name}` | {kinds[name]} | {cells[0]} | {cells[1]} |\n")
    return "".join(rows)


def _source(alias: Alias) -> str:
    wanted = f" where `{alias.label}` is {' or '.join(alias.values)}" if alias.values else ""
    return f"`{alias.source.name}`{wanted}"
