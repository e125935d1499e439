"""Prefill: how much prompt is waiting, how fast it is computed, what the cache saves."""

from __future__ import annotations

from pdserve.obs.dashboards.panel import Dashboard, Panel, Unit, mean, quantiles, query, rate, share

_P = '{role="prefill"}'

_BACKLOG = (
    Panel(
        title="Outstanding prompt tokens",
        unit=Unit.TOKENS,
        description="Prompt tokens that no cache has, queued or sent to workers, not computed yet. "
        "Prefill is scaled by this.",
        queries=(query("sum(pdserve_outstanding_prefill_tokens)", "outstanding"),),
    ),
    Panel(
        title="Waiting prompts",
        unit=Unit.COUNT,
        description="Requests that wait on each prefill worker for their first chunk.",
        queries=(query(f"pdserve_worker_waiting_requests{_P}", "{{worker}}"),),
    ),
    Panel(
        title="Waiting prompt tokens",
        unit=Unit.TOKENS,
        description="Tokens of the prompts that wait on each prefill worker.",
        queries=(query(f"pdserve_worker_waiting_tokens{_P}", "{{worker}}"),),
    ),
    Panel(
        title="Wait for a step",
        unit=Unit.SECONDS,
        description="From a prompt being ready on a prefill worker (both halves there) to its first step.",
        queries=quantiles("pdserve_worker_prefill_queue_seconds", _P),
    ),
    Panel(
        title="Computing a prompt",
        unit=Unit.SECONDS,
        description="Time that a prompt's chunks computed on prefill workers.",
        queries=quantiles("pdserve_worker_prefill_compute_seconds", _P),
    ),
    Panel(
        title="Prompts in hand",
        unit=Unit.COUNT,
        description="Requests that each prefill worker computes.",
        queries=(query(f"pdserve_worker_running_requests{_P}", "{{worker}}"),),
    ),
)

_SPEED = (
    Panel(
        title="Prompt tokens computed",
        unit=Unit.TOKENS_PER_SECOND,
        description="Prompt tokens that each prefill worker computes per second.",
        queries=(
            query(
                rate(
                    'pdserve_worker_prompt_tokens_total{role="prefill",source="computed"}', "worker, instance"
                ),
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        title="Tokens per second of computing",
        unit=Unit.TOKENS_PER_SECOND,
        description="Prompt tokens computed over the time that steps took: the speed of a prefill worker "
        "whose waits do not count. Lower than usual: small batches or a slower machine.",
        queries=(
            query(
                share(
                    'pdserve_worker_prompt_tokens_total{role="prefill",source="computed"}',
                    f"pdserve_worker_step_seconds_sum{_P}",
                    "worker, instance",
                ),
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        title="Busy",
        unit=Unit.RATIO,
        description="Share of the time in which each prefill worker executes a step. Near 1: more workers "
        "would help.",
        queries=(query(rate(f"pdserve_worker_step_seconds_sum{_P}", "worker, instance"), "{{worker}}"),),
    ),
    Panel(
        title="Prompt tokens found in the cache",
        unit=Unit.RATIO,
        description="Share of the prompt tokens at each prefill worker that its prefix cache had.",
        queries=(
            query(
                share(
                    'pdserve_worker_prompt_tokens_total{role="prefill",source="prefix_hit"}',
                    'pdserve_worker_prompt_tokens_total{role="prefill",source=~"computed|prefix_hit"}',
                    "worker, instance",
                ),
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        title="Rows of a step",
        unit=Unit.COUNT,
        description="Mean number of tokens that a prefill step computes.",
        queries=(query(mean("pdserve_worker_step_rows", "worker, instance", _P), "{{worker}}"),),
    ),
    Panel(
        title="Step time",
        unit=Unit.SECONDS,
        description="How long a step of a prefill worker takes.",
        queries=quantiles("pdserve_worker_step_seconds", _P),
    ),
)

PREFILL = Dashboard(
    uid="pdserve-prefill",
    title="pdserve: prefill",
    description="How much prompt is waiting, how fast it is computed, what the cache saves.",
    panels=(*_BACKLOG, *_SPEED),
)
