"""What happens to requests: how they come in and end, how long they wait, where their time goes."""

from __future__ import annotations

from pdserve.obs.dashboards.groups import OUTCOME_GROUPS
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
    share,
)

_TRAFFIC = (
    Panel(
        title="Requests by outcome",
        unit=Unit.REQUESTS_PER_SECOND,
        description="Requests that ended, by finish reason or label of the error. docs/operate.md says what "
        "to do about each label.",
        queries=(query(rate("pdserve_requests_total", "outcome"), "{{outcome}}"),),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Requests by group",
        unit=Unit.RATIO,
        description="The same as shares: finished, refused (the caller's error), shed, cancelled, failed "
        "(our fault).",
        queries=tuple(
            query(share(f'pdserve_requests_total{{outcome=~"{values}"}}', "pdserve_requests_total"), name)
            for name, values in OUTCOME_GROUPS.items()
        ),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Who computed the prompt",
        unit=Unit.REQUESTS_PER_SECOND,
        description="Prompts by mode: on a prefill worker and handed over, on the decode worker itself, or "
        "on an aggregated worker.",
        queries=(query(rate("pdserve_handovers_total", "mode"), "{{mode}}"),),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Sheds",
        unit=Unit.REQUESTS_PER_SECOND,
        description="Requests that were turned away for lack of room, by why.",
        queries=(query(rate("pdserve_shed_requests_total", "reason"), "{{reason}}"),),
    ),
    Panel(
        title="Tries after the first",
        unit=Unit.PER_SECOND,
        description="Requests sent to workers again because a worker died, drained or refused.",
        queries=(query(rate("pdserve_retries_total"), "retries"),),
    ),
    Panel(
        title="Callers refused",
        unit=Unit.PER_SECOND,
        description="Calls refused at the door, by what was wrong with their credential.",
        queries=(query(rate("pdserve_auth_failures_total", "reason"), "{{reason}}"),),
    ),
)  # fmt: skip

_TIMES = (
    Panel(
        title="Wait in the router's queue",
        unit=Unit.SECONDS,
        description="From admission to the first try. It grows when workers are full.",
        queries=quantiles("pdserve_queue_seconds"),
    ),
    Panel(
        title="Time to first token",
        unit=Unit.SECONDS,
        description="From admission of a request to its first token, 95th percentile by mode.",
        queries=(query(quantile(0.95, "pdserve_ttft_seconds", "mode"), "{{mode}}"),),
    ),
    Panel(
        title="Time to the last token",
        unit=Unit.SECONDS,
        description="From admission to the end of the stream, all modes together. It grows with the answers' "
        "length.",
        queries=quantiles("pdserve_e2e_seconds"),
    ),
    Panel(
        title="Where the time to the first token goes",
        unit=Unit.SECONDS,
        description="Mean seconds of each phase on the way to the first token, and of the first decode step "
        "after it (docs/ledger.md).",
        queries=(query(mean("pdserve_phase_seconds", "phase"), "{{phase}}"),),
        kind=Kind.STACKED,
        width=16,
    ),
    Panel(
        title="Time that no phase explains",
        unit=Unit.SECONDS,
        description="Time to first token less all phases (the ledger's residual). It should stay below 2 ms; "
        "more is a stretch that nobody stamps.",
        queries=quantiles("pdserve_ledger_residual_seconds"),
    ),
    Panel(
        title="Gaps between tokens",
        unit=Unit.SECONDS,
        description="Gaps per second by length: one column for each moment, darker where more gaps are.",
        queries=(query(rate("pdserve_itl_seconds_bucket", "le"), "{{le}}"),),
        kind=Kind.HEATMAP,
        width=16,
    ),
)

_TOKENS = (
    Panel(
        title="Prompt tokens by source",
        unit=Unit.TOKENS_PER_SECOND,
        description="Computed, found in a prefill worker's cache, found in a decode worker's cache, and "
        "transferred (which overlaps the first two).",
        queries=(query(rate("pdserve_prompt_tokens_total", "source"), "{{source}}"),),
    ),
    Panel(
        title="Prompt tokens not computed",
        unit=Unit.RATIO,
        description="Share of the prompt tokens that some worker's prefix cache had.",
        queries=(
            query(
                share('pdserve_tokens_total{kind="cached"}', 'pdserve_tokens_total{kind="prompt"}'), "hits"
            ),
        ),
    ),
    Panel(
        title="Tokens for nobody",
        unit=Unit.TOKENS_PER_SECOND,
        description="Tokens that came after a stop text had matched, and tokens of tries given up.",
        queries=(
            query(rate("pdserve_discarded_tokens_total"), "after a stop text"),
            query(rate("pdserve_ignored_tokens_total"), "of tries given up"),
        ),
    ),
)

REQUESTS = Dashboard(
    uid="pdserve-requests",
    title="pdserve: requests",
    description="How requests come in and end, how long they wait, where their time goes.",
    panels=(*_TRAFFIC, *_TIMES, *_TOKENS),
)
