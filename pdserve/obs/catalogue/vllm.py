"""vLLM's names for what we count under our own, served with `vllm_metrics`: for dashboards, autoscalers and
endpoint pickers (Gateway API Inference Extension) made for vLLM.

A metric here is a view of one of ours at the moment of a scrape: it costs nothing in between. Buckets are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.obs.catalogue import router, worker
from pdserve.obs.catalogue.kinds import Kind, Label, Metric

COMMON = (Label("model_name"), Label("engine"))
"""vLLM's labels of all its series: the served model, and "0" as there is one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Another name for a metric of ours.

    metric: what it looks like under that name. source: ours; its series are summed. label: only those series
    where this label has one of `values`. keep: `label` stays, under this name.
    """

    metric: Metric
    source: Metric
    label: str = ""
    values: tuple[str, ...] = ()
    keep: str = ""


def _alias(name: str, help_text: str, source: Metric, label: str = "", values: tuple[str, ...] = ()) -> Alias:
    metric = Metric(
        name=f"vllm:{name}", kind=source.kind, help=help_text, labels=COMMON, buckets=source.buckets
    )
    return Alias(metric=metric, source=source, label=label, values=values)


def _gauge(name: str, help_text: str, *labels: Label) -> Metric:
    return Metric(name=f"vllm:{name}", kind=Kind.GAUGE, help=help_text, labels=labels)


FINISHED = Label("finished_reason", ("stop", "length"))
KV_USAGE = _gauge(
    "kv_cache_usage_perc", "KV cache in use, 0 to 1; a router tells the fullest role's.", *COMMON
)
GPU_CACHE_USAGE = _gauge("gpu_cache_usage_perc", "The same under its name before vLLM 0.9.", *COMMON)
CACHE_CONFIG = _gauge(
    "cache_config_info", "Always 1; labels tell tokens of a page and how many pages there are.",
    *COMMON, Label("block_size"), Label("num_gpu_blocks"),
)  # fmt: skip
LORA_REQUESTS = _gauge(
    "lora_requests_info", "Seconds since 1970; no adapters are served, so the labels are 0 and empty.",
    Label("max_lora", ("0",)), Label("running_lora_adapters", ("",)), Label("waiting_lora_adapters", ("",)),
)  # fmt: skip
COMPUTED_AT_SCRAPE = (KV_USAGE, GPU_CACHE_USAGE, CACHE_CONFIG, LORA_REQUESTS)

_SUCCESS = Metric(
    name="vllm:request_success_total", kind=Kind.COUNTER, help="Requests that finished, by how.",
    labels=(*COMMON, FINISHED),
)  # fmt: skip
ROUTER_ALIASES = (
    _alias("num_requests_running", "Requests sent to workers.", router.RUNNING),
    _alias("num_requests_waiting", "Requests that wait for workers.", router.QUEUED),
    _alias("prompt_tokens_total", "Prompt tokens of ended requests.", router.TOKENS, "kind", ("prompt",)),
    _alias("generation_tokens_total", "Tokens that came for clients.", router.SENT_TOKENS),
    _alias("prefix_cache_queries_total", "Prompt tokens looked up.", router.TOKENS, "kind", ("prompt",)),
    _alias("prefix_cache_hits_total", "Of those, found in a cache.", router.TOKENS, "kind", ("cached",)),
    Alias(
        metric=_SUCCESS, source=router.REQUESTS, label="outcome", values=FINISHED.values,
        keep="finished_reason",
    ),
    _alias("time_to_first_token_seconds", "From admission to the first token.", router.TTFT),
    _alias("inter_token_latency_seconds", "Between two tokens.", router.ITL),
    _alias("time_per_output_token_seconds", "The same under its name before vLLM 0.11.", router.ITL),
    _alias("e2e_request_latency_seconds", "From admission to the end.", router.E2E),
    _alias("request_queue_time_seconds", "From admission to the first try.", router.QUEUE),
    _alias("request_prefill_time_seconds", "Computing a prompt on a prefill worker.", router.PREFILL),
    _alias("request_prompt_tokens", "Tokens of a prompt.", router.PROMPT_LENGTH),
    _alias("request_generation_tokens", "Tokens of an answer.", router.COMPLETION_LENGTH),
)  # fmt: skip
_ITERATION = Metric(
    name="vllm:iteration_tokens_total", kind=Kind.HISTOGRAM, help="Rows of a step.", labels=COMMON,
    buckets=worker.STEP_ROWS.buckets,
)  # fmt: skip
WORKER_ALIASES = (
    _alias("num_requests_running", "Requests being computed or received.", worker.RUNNING),
    _alias("num_requests_waiting", "Requests that wait here.", worker.WAITING),
    _alias("prompt_tokens_total", "Prompt tokens, wherever their pages came from.", worker.PROMPT_TOKENS),
    _alias("generation_tokens_total", "Tokens made here.", worker.GENERATED_TOKENS),
    _alias("prefix_cache_queries_total", "Prompt tokens looked up.", worker.PROMPT_TOKENS),
    _alias(
        "prefix_cache_hits_total", "Of those, found in this cache.", worker.PROMPT_TOKENS, "source",
        ("prefix_hit",),
    ),
    _alias("num_preemptions_total", "Sequences that lost their pages to others.", worker.PREEMPTIONS),
    _alias("request_queue_time_seconds", "From a prompt's arrival to its first step.", worker.PREFILL_QUEUE),
    _alias("request_prefill_time_seconds", "Computing a prompt here.", worker.PREFILL_COMPUTE),
    Alias(metric=_ITERATION, source=worker.STEP_ROWS),
)  # fmt: skip

VLLM_ROUTER = (*COMPUTED_AT_SCRAPE, *(alias.metric for alias in ROUTER_ALIASES))
VLLM_WORKER = (*COMPUTED_AT_SCRAPE, *(alias.metric for alias in WORKER_ALIASES))
