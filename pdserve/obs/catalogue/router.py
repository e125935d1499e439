"""Metrics of a router: requests, and its view of the whole fleet. Several routers see the same workers, so
gauges of workers are taken with `max by`, not `sum by`, over routers; counters and histograms of requests add
up.
"""

from __future__ import annotations

from pdserve.errors import BY_LABEL
from pdserve.obs.catalogue.kinds import (
    AGE,
    GAP_SECONDS,
    PAGE_STATE,
    PHASE_SECONDS,
    REQUEST_SECONDS,
    ROLE,
    SHORT_SECONDS,
    TOKEN_COUNTS,
    USED_STATE,
    Label,
    counter,
    gauge,
    histogram,
)
from pdserve.types import REBALANCE_OUTCOMES, FinishReason, Phase

MODE = Label("mode", ("disaggregated", "local", "aggregated"))
"""Who computed the prompt: a prefill worker, the decode worker itself, or a worker of both roles."""
OUTCOMES = (*(str(reason) for reason in FinishReason), *BY_LABEL)
"""How a request can end: a finish reason, or the label of an error."""
SHED_REASONS = ("queue_full", "tenant_share", "deadline", "displaced", "waited_too_long", "texts_full")
"""Why a request was not queued or not kept: no room; its tenant has its share; its deadline would pass; more
urgent ones came; no worker in time; too many texts wait to be scored or embedded."""
AUTH_REASONS = (
    "missing", "malformed", "unknown_key", "wrong_secret", "expired", "bad_token", "throttled", "not_admin"
)  # fmt: skip
PROMPT_SOURCES = ("computed", "hit_prefill", "hit_decode", "transferred")
WORKER_STATES = ("ready", "suspect", "draining", "not_ready")
OUTCOME = Label("outcome", OUTCOMES)

TTFT = histogram(
    "pdserve_ttft_seconds", "From admission of a request to its first token.", MODE, buckets=REQUEST_SECONDS
)
ITL = histogram("pdserve_itl_seconds", "Between two tokens of a stream.", MODE, buckets=GAP_SECONDS)
E2E = histogram(
    "pdserve_e2e_seconds", "From admission of a request to its end, of those that finished.", MODE,
    buckets=REQUEST_SECONDS,
)  # fmt: skip
QUEUE = histogram("pdserve_queue_seconds", "From admission to the first try.", buckets=REQUEST_SECONDS)
PREFILL = histogram(
    "pdserve_prefill_seconds", "Computing a prompt on a prefill worker.", buckets=REQUEST_SECONDS
)
TRANSFER = histogram(
    "pdserve_transfer_seconds", "From the first page announced to the last verified.", buckets=PHASE_SECONDS
)
PHASES = histogram(
    "pdserve_phase_seconds", "Phases on the way to the first token, and the first step after it.",
    Label("phase", tuple(str(phase) for phase in Phase)), buckets=PHASE_SECONDS,
)  # fmt: skip
RESIDUAL = histogram(
    "pdserve_ledger_residual_seconds", "TTFT that no phase accounts for, absolute.", buckets=SHORT_SECONDS
)
HANDOVER = histogram(
    "pdserve_handover_seconds", "From the last chunk computed to the first decode step.",
    buckets=PHASE_SECONDS,
)  # fmt: skip
WIRE_HIDDEN = histogram(
    "pdserve_wire_hidden_ratio", "Share of the wire time that is hidden behind compute, 0 to 1.",
    buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0),
)  # fmt: skip
PROMPT_LENGTH = histogram(
    "pdserve_request_prompt_tokens", "Prompt tokens of a request that finished.", buckets=TOKEN_COUNTS
)
COMPLETION_LENGTH = histogram(
    "pdserve_request_completion_tokens",
    "Tokens made for a request that finished.",
    buckets=TOKEN_COUNTS,
)

REQUESTS = counter("pdserve_requests", "Requests by outcome: a finish reason or an error label.", OUTCOME)
SHED = counter(
    "pdserve_shed_requests", "Requests refused or dropped for want of room or time, by why.",
    Label("reason", SHED_REASONS),
)  # fmt: skip
HANDOVERS = counter(
    "pdserve_handovers", "First tokens by who computed the prompt; a request that began again elsewhere "
    "counts once.", MODE,
)  # fmt: skip
RETRIES = counter("pdserve_retries", "Tries after the first.")
AUTH_FAILURES = counter(
    "pdserve_auth_failures", "Calls refused at the door, by why.", Label("reason", AUTH_REASONS)
)
TOKENS = counter(
    "pdserve_tokens", "Tokens of ended requests by kind; cached ones are among the prompt's.",
    Label("kind", ("prompt", "cached", "completion")),
)  # fmt: skip
PROMPT_TOKENS = counter(
    "pdserve_prompt_tokens", "Prompt tokens by where their KV pages came from: computed (by whichever "
    "worker), found in a prefix cache of prefill or of decode, transferred (these are also among computed or "
    "hit_prefill).", Label("source", PROMPT_SOURCES),
)  # fmt: skip
SENT_TOKENS = counter(
    "pdserve_sent_tokens", "Tokens that came from workers for clients, each once; those of beams and choices "
    "that were dropped in the end are among them.",
)  # fmt: skip
DISCARDED_TOKENS = counter("pdserve_discarded_tokens", "Tokens that came after a stop text had matched.")
IGNORED_TOKENS = counter("pdserve_ignored_tokens", "Tokens of given-up tries, and repeated ones.")
SLO_REQUESTS = counter(
    "pdserve_slo_requests", "Finished requests by whether they met the objective: TTFT at most slo_ttft_s, "
    "mean gap between tokens at most slo_itl_s.",
    Label("objective", ("ttft", "itl")), Label("met", ("yes", "no")),
)  # fmt: skip

QUEUED = gauge("pdserve_queued_requests", "Requests that wait for workers.")
RUNNING = gauge("pdserve_running_requests", "Requests sent to workers.")
OUTSTANDING_PREFILL_TOKENS = gauge(
    "pdserve_outstanding_prefill_tokens", "Uncached prompt tokens that are queued, or sent and not computed."
)
KV_UTILIZATION = gauge(
    "pdserve_kv_utilization_ratio", "Pages neither free nor evictable over all pages, 0 to 1; mean over "
    "workers.", ROLE,
)  # fmt: skip
WORKERS = gauge(
    "pdserve_workers", "Workers registered, by state; a silent one is suspect, whatever else it is.", ROLE,
    Label("state", WORKER_STATES),
)  # fmt: skip
PAGES = gauge("pdserve_pages", "KV pages by state.", ROLE, PAGE_STATE)
USED_PAGES = gauge(
    "pdserve_used_pages", "KV pages neither free nor evictable, by use and age.", ROLE, USED_STATE, AGE
)
USED_PAGE_BYTES = gauge(
    "pdserve_used_page_bytes", "Bytes of KV pages neither free nor evictable, by use and age.", ROLE,
    USED_STATE, AGE,
)  # fmt: skip
TRANSFER_BYTES = gauge("pdserve_transfer_bytes", "Bytes held for transfers.", ROLE)
TRANSFER_PEAK_BYTES = gauge("pdserve_transfer_peak_bytes", "The most there ever were.", ROLE)
REBALANCES = gauge(
    "pdserve_rebalances", "Placements of experts by how they ended, of the workers that are here now.", ROLE,
    Label("outcome", REBALANCE_OUTCOMES),
)  # fmt: skip
EXPERT_COPIED_BYTES = gauge("pdserve_expert_copied_bytes", "Weights that came to other ranks.", ROLE)
EXPERT_IMBALANCE = gauge(
    "pdserve_expert_imbalance", "Load of the fullest ranks over the mean; the worst worker's.", ROLE
)
EXPERT_BALANCE_LOSS = gauge(
    "pdserve_expert_balance_loss", "Auxiliary balance loss of routers, 1 if even; the worst worker's.", ROLE
)
LOST_RANKS = gauge("pdserve_lost_ranks", "Ranks that workers go on without, degraded.", ROLE)
INSECURE = gauge("pdserve_insecure", "1 if --insecure was given: no TLS beyond loopback.")
BUILD_INFO = gauge("pdserve_build_info", "Always 1; the label tells the release.", Label("version"))

ROUTER = (
    TTFT, ITL, E2E, QUEUE, PREFILL, TRANSFER, PHASES, RESIDUAL, HANDOVER, WIRE_HIDDEN,
    PROMPT_LENGTH, COMPLETION_LENGTH,
    REQUESTS, SHED, HANDOVERS, RETRIES, AUTH_FAILURES, TOKENS, PROMPT_TOKENS, SENT_TOKENS, DISCARDED_TOKENS,
    IGNORED_TOKENS, SLO_REQUESTS,
    QUEUED, RUNNING, OUTSTANDING_PREFILL_TOKENS, KV_UTILIZATION, WORKERS, PAGES, USED_PAGES, USED_PAGE_BYTES,
    TRANSFER_BYTES, TRANSFER_PEAK_BYTES, REBALANCES, EXPERT_COPIED_BYTES, EXPERT_IMBALANCE,
    EXPERT_BALANCE_LOSS, LOST_RANKS, INSECURE, BUILD_INFO,
)  # fmt: skip
