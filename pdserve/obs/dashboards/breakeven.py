"""Break-even: does it pay to compute prompts on other workers than tokens, and for which requests?"""

from __future__ import annotations

from pdserve.obs.dashboards.panel import Dashboard, Kind, Panel, Unit, mean, quantile, query, rate, share

_DIS = '{mode="disaggregated"}'
_ONE = '{mode=~"local|aggregated"}'


def _mean_of(histogram: str, matchers: str) -> str:
    return f"({share(f'{histogram}_sum{matchers}', f'{histogram}_count{matchers}')})"


_COST = f"({_mean_of('pdserve_ttft_seconds', _DIS)} - {_mean_of('pdserve_ttft_seconds', _ONE)})"
_GAIN = f"({_mean_of('pdserve_itl_seconds', _ONE)} - {_mean_of('pdserve_itl_seconds', _DIS)})"

_TIMES = (
    Panel(
        title="Lengths",
        unit=Unit.TOKENS,
        description="Median tokens of prompts and of answers of the requests that ended. Long prompts with "
        "long answers gain most from disaggregation.",
        queries=(
            query(quantile(0.5, "pdserve_request_prompt_tokens"), "prompt"),
            query(quantile(0.5, "pdserve_request_completion_tokens"), "answer"),
        ),
    ),
    Panel(
        title="Time to first token by mode",
        unit=Unit.SECONDS,
        description="Mean by who computed the prompt. Compare modes only if their prompts are alike.",
        queries=(query(mean("pdserve_ttft_seconds", "mode"), "{{mode}}"),),
    ),
    Panel(
        title="Gap between tokens by mode",
        unit=Unit.SECONDS,
        description="Mean by who computed the prompt.",
        queries=(query(mean("pdserve_itl_seconds", "mode"), "{{mode}}"),),
    ),
    Panel(
        title="Longest gaps by mode",
        unit=Unit.SECONDS,
        description="99th percentile of the gaps between tokens: where one worker does both, it is stretched "
        "by other requests' prompts.",
        queries=(query(quantile(0.99, "pdserve_itl_seconds", "mode"), "{{mode}}"),),
    ),
    Panel(
        title="Whole requests by mode",
        unit=Unit.SECONDS,
        description="Mean time from admission to the last token.",
        queries=(query(mean("pdserve_e2e_seconds", "mode"), "{{mode}}"),),
    ),
    Panel(
        title="Requests by mode",
        unit=Unit.REQUESTS_PER_SECOND,
        description="How many requests stand behind each line of this page.",
        queries=(query(rate("pdserve_handovers_total", "mode"), "{{mode}}"),),
        kind=Kind.STACKED,
    ),
)

_BALANCE = (
    Panel(
        title="Cost in first tokens",
        unit=Unit.SECONDS,
        description="Mean time to first token disaggregated, less that of prompts computed where decoding "
        "happens. Below 0 there is no cost: prompts no longer wait for decode steps.",
        queries=(query(_COST, "cost"),),
    ),
    Panel(
        title="Gain per token",
        unit=Unit.SECONDS,
        description="Mean gap between tokens where one worker does both, less that of split requests.",
        queries=(query(_GAIN, "gain"),),
    ),
    Panel(
        title="Answers that gain",
        unit=Unit.TOKENS,
        description="Cost over gain: answers longer than this end sooner disaggregated. To be read while the "
        "two panels before are above 0. Without a cost all answers gain; without a gain none does.",
        queries=(query(f"{_COST} / {_GAIN}", "tokens"),),
    ),
    Panel(
        title="Handover of a prompt",
        unit=Unit.SECONDS,
        description="Mean time from the last chunk to the first decode step: what disaggregation costs each "
        "request, beside computing the prompt.",
        queries=(
            query(mean("pdserve_handover_seconds"), "handover"),
            query(mean("pdserve_prefill_seconds"), "computing"),
        ),
    ),
    Panel(
        title="Moving a token against computing it",
        unit=Unit.SECONDS,
        description="Seconds of transfer for each token transferred and seconds of prefill steps for each "
        "token computed. Moving pays where its line is far below.",
        queries=(
            query(
                share(
                    "pdserve_transfer_seconds_sum", 'pdserve_prompt_tokens_total{source="transferred"}'
                ),
                "moving",
            ),
            query(
                share("pdserve_prefill_seconds_sum", 'pdserve_prompt_tokens_total{source="computed"}'),
                "computing",
            ),
        ),
    ),
    Panel(
        title="Busy by role",
        unit=Unit.RATIO,
        description="Mean share of the time in which workers execute steps. A role that idles while the "
        "other is full wants fewer workers, or an aggregated fleet.",
        queries=(
            query(
                "avg by (role) (rate(pdserve_worker_step_seconds_sum[$__rate_interval]))",
                "{{role}}",
            ),
        ),
    ),
)  # fmt: skip

BREAK_EVEN = Dashboard(
    uid="pdserve-break-even",
    title="pdserve: break-even",
    description="Does it pay to compute prompts on other workers than tokens, and for which requests?",
    panels=(*_TIMES, *_BALANCE),
)
