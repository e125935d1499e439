"""Decode: how many sequences run, how long a step takes, what waits and what is taken back."""

from __future__ import annotations

from pdserve.obs.dashboards.panel import (
    Dashboard,
    Kind,
    Panel,
    Unit,
    mean,
    quantile,
    quantiles,
    query,
    rate,
)

_D = '{role=~"decode|aggregated"}'

_SPEED = (
    Panel(
        title="Tokens made",
        unit=Unit.TOKENS_PER_SECOND,
        description="Tokens that each worker makes per second.",
        queries=(
            query(rate(f"pdserve_worker_generated_tokens_total{_D}", "worker, instance"), "{{worker}}"),
        ),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Gap between tokens",
        unit=Unit.SECONDS,
        description="Between two tokens of a stream as the router sees it, 99th percentile by mode. Under "
        "disaggregation prompts of others do not stretch it.",
        queries=(query(quantile(0.99, "pdserve_itl_seconds", "mode"), "{{mode}}"),),
    ),
    Panel(
        title="Step time",
        unit=Unit.SECONDS,
        description="How long a step takes: one token for every running sequence.",
        queries=quantiles("pdserve_worker_step_seconds", _D),
    ),
    Panel(
        title="Sequences of a step",
        unit=Unit.COUNT,
        description="Mean number of sequences that share a step. More: more tokens per second, longer steps.",
        queries=(query(mean("pdserve_worker_step_sequences", "worker, instance", _D), "{{worker}}"),),
    ),
    Panel(
        title="Rows of a step",
        unit=Unit.COUNT,
        description="Mean number of tokens that a step computes. Above the sequences: prompts are computed "
        "on this worker too.",
        queries=(query(mean("pdserve_worker_step_rows", "worker, instance", _D), "{{worker}}"),),
    ),
    Panel(
        title="Busy",
        unit=Unit.RATIO,
        description="Share of the time in which each worker executes a step. Near 1 is normal: a step "
        "takes as many sequences as there are.",
        queries=(query(rate(f"pdserve_worker_step_seconds_sum{_D}", "worker, instance"), "{{worker}}"),),
    ),
)

_LOAD = (
    Panel(
        title="Running requests",
        unit=Unit.COUNT,
        description="Requests that each worker makes tokens for.",
        queries=(query(f"pdserve_worker_running_requests{_D}", "{{worker}}"),),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Waiting requests",
        unit=Unit.COUNT,
        description="Requests on each worker that wait for their pages or for room in a step.",
        queries=(query(f"pdserve_worker_waiting_requests{_D}", "{{worker}}"),),
    ),
    Panel(
        title="Wait for the first step",
        unit=Unit.SECONDS,
        description="From the handover being complete to the first step that has the request.",
        queries=quantiles("pdserve_worker_decode_queue_seconds", _D),
    ),
    Panel(
        title="Preemptions",
        unit=Unit.PER_SECOND,
        description="Requests whose pages were taken back for older ones: they are computed again. Steady "
        "numbers mean that decode lacks memory.",
        queries=(query(rate(f"pdserve_worker_preemptions_total{_D}", "worker, instance"), "{{worker}}"),),
    ),
    Panel(
        title="Refusals",
        unit=Unit.PER_SECOND,
        description="Requests that workers refused, by why; the router tries another worker.",
        queries=(query(rate("pdserve_worker_refusals_total", "role, reason"), "{{role}} {{reason}}"),),
    ),
    Panel(
        title="KV memory in use",
        unit=Unit.RATIO,
        description="Share of each worker's KV pages that are neither free nor evictable.",
        queries=(query(f"pdserve_worker_kv_utilization_ratio{_D}", "{{worker}}"),),
    ),
)

DECODE = Dashboard(
    uid="pdserve-decode",
    title="pdserve: decode",
    description="How many sequences run, how long a step takes, what waits and what is taken back.",
    panels=(*_SPEED, *_LOAD),
)
