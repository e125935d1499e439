"""The first page to look at: is the fleet healthy, are its targets met?"""

from __future__ import annotations

from pdserve.obs.dashboards.groups import FAILED, OUTCOME_GROUPS
from pdserve.obs.dashboards.panel import (
    Colour,
    Dashboard,
    Kind,
    Panel,
    Step,
    Unit,
    quantiles,
    query,
    rate,
    share,
)

_TARGET_STEPS = (
    Step(value=0.0, colour=Colour.BAD),
    Step(value=0.95, colour=Colour.WARNING),
    Step(value=0.99, colour=Colour.GOOD),
)


def _met(objective: str, title: str, about: str) -> Panel:
    every = f'pdserve_slo_requests_total{{objective="{objective}"}}'
    met = f'pdserve_slo_requests_total{{objective="{objective}",met="yes"}}'
    return Panel(
        title=title,
        unit=Unit.RATIO,
        description=f"Share of finished requests {about}. Empty while no request finishes.",
        queries=(query(share(met, every), "met"),),
        kind=Kind.STAT,
        width=6,
        steps=_TARGET_STEPS,
    )


_HEALTH = (
    Panel(
        title="Workers ready",
        unit=Unit.COUNT,
        description="Workers that take requests, by role, as the routers see them.",
        queries=(query('max by (role) (pdserve_workers{state="ready"})', "{{role}}"),),
        kind=Kind.STAT,
        width=6,
    ),
    Panel(
        title="Failed requests",
        unit=Unit.RATIO,
        description="Share of requests that ended by a fault of ours: no refusals, no sheds, no cancels. "
        "The alert PdserveErrorRate begins at 1 %.",
        queries=(
            query(
                share(f'pdserve_requests_total{{outcome=~"{FAILED}"}}', "pdserve_requests_total"), "failed"
            ),
        ),
        kind=Kind.STAT,
        width=6,
        steps=(Step(value=0.001, colour=Colour.WARNING), Step(value=0.01, colour=Colour.BAD)),
    ),
    _met("ttft", "First tokens in time", "whose first token came within slo_ttft_s"),
    _met("itl", "Token gaps in time", "whose mean gap between tokens was at most slo_itl_s"),
)

_TRAFFIC = (
    Panel(
        title="Requests",
        unit=Unit.REQUESTS_PER_SECOND,
        description="Requests that ended, per second: finished, refused (the caller's error), shed (no "
        "room), cancelled (nobody waits), failed (our fault).",
        queries=tuple(
            query(rate(f'pdserve_requests_total{{outcome=~"{values}"}}'), name)
            for name, values in OUTCOME_GROUPS.items()
        ),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Time to first token",
        unit=Unit.SECONDS,
        description="From admission of a request to its first token, all modes together.",
        queries=quantiles("pdserve_ttft_seconds"),
    ),
    Panel(
        title="Gap between tokens",
        unit=Unit.SECONDS,
        description="Between two tokens of a stream (inter-token latency), all modes together.",
        queries=quantiles("pdserve_itl_seconds"),
    ),
    Panel(
        title="Tokens",
        unit=Unit.TOKENS_PER_SECOND,
        description="Prompt tokens taken in and tokens sent to clients, per second.",
        queries=(
            query(rate('pdserve_tokens_total{kind="prompt"}'), "prompt"),
            query(rate("pdserve_sent_tokens_total"), "completion"),
        ),
    ),
    Panel(
        title="Requests in hand",
        unit=Unit.COUNT,
        description="Requests that wait in the routers' queues, and requests that are with workers.",
        queries=(
            query("sum(pdserve_queued_requests)", "queued"),
            query("sum(pdserve_running_requests)", "running"),
        ),
    ),
    Panel(
        title="KV memory in use",
        unit=Unit.RATIO,
        description="Share of the KV pages that are neither free nor evictable, mean over a role's workers. "
        "Decode is scaled by it.",
        queries=(query("max by (role) (pdserve_kv_utilization_ratio)", "{{role}}"),),
    ),
)

OVERVIEW = Dashboard(
    uid="pdserve-overview",
    title="pdserve: overview",
    description="Is the fleet healthy, are its targets met?",
    panels=(*_HEALTH, *_TRAFFIC),
)
