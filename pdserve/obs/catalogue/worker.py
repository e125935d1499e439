"""Metrics of a worker. Every series also has the label `role`, the worker's own."""

from __future__ import annotations

from pdserve.messages import Refusal
from pdserve.obs.catalogue.kinds import (
    AGE,
    COUNTS,
    GAP_SECONDS,
    OTHER,
    PAGE_STATE,
    PHASE_SECONDS,
    REQUEST_SECONDS,
    ROLE,
    SHORT_SECONDS,
    USED_STATE,
    Label,
    counter,
    gauge,
    histogram,
)

TRANSPORT = Label("transport", ("shm", "tcp", "nixl", "none"))
"""none: a transfer that ended before any of its pages was read."""
PROMPT_SOURCES = ("computed", "prefix_hit", "transferred")
TRANSFER_OUTCOMES = ("complete", "failed", "cancelled")
EVENTS = (
    "wrong_content_key", "quarantined", "reads_good", "reads_stale", "reads_mismatch", "reads_failed",
    "over_credit", "refused_tickets", "source_corrupt", "unsent_messages", "unreadable_envelopes",
    "foreign_envelopes", OTHER,
)  # fmt: skip
"""Names of `kvtransfer.effects.Count` that have no metric of their own."""

PREFILL_QUEUE = histogram(
    "pdserve_worker_prefill_queue_seconds", "From a prompt's both halves being there to its first chunk's "
    "step.", ROLE, buckets=REQUEST_SECONDS,
)  # fmt: skip
PREFILL_COMPUTE = histogram(
    "pdserve_worker_prefill_compute_seconds", "Computing a prompt: the sum of its chunks' steps.", ROLE,
    buckets=REQUEST_SECONDS,
)  # fmt: skip
TRANSFER = histogram(
    "pdserve_worker_transfer_seconds", "Decode: from a request's first page announced to its last verified.",
    ROLE, TRANSPORT, buckets=PHASE_SECONDS,
)  # fmt: skip
VERIFY = histogram(
    "pdserve_worker_verify_seconds", "Decode: checking the digests of one request's pages, all together.",
    ROLE, buckets=SHORT_SECONDS,
)  # fmt: skip
DECODE_QUEUE = histogram(
    "pdserve_worker_decode_queue_seconds", "From a sequence being complete here to its first decode step.",
    ROLE, buckets=PHASE_SECONDS,
)  # fmt: skip
STEP = histogram("pdserve_worker_step_seconds", "One step of the engine.", ROLE, buckets=GAP_SECONDS)
STEP_SEQUENCES = histogram("pdserve_worker_step_sequences", "Sequences in one step.", ROLE, buckets=COUNTS)
STEP_ROWS = histogram(
    "pdserve_worker_step_rows", "Rows (prompt tokens and one for each decoding sequence) in one step.", ROLE,
    buckets=COUNTS,
)  # fmt: skip

RUNNING = gauge("pdserve_worker_running_requests", "Sequences that take part in steps.", ROLE)
WAITING = gauge(
    "pdserve_worker_waiting_requests", "Sequences that wait for their first step, or for pages again.", ROLE
)
WAITING_TOKENS = gauge(
    "pdserve_worker_waiting_tokens", "Prompt tokens that are still to be computed here.", ROLE
)
PAGES = gauge("pdserve_worker_pages", "KV pages by state.", ROLE, PAGE_STATE)
USED_PAGES = gauge(
    "pdserve_worker_used_pages", "KV pages neither free nor evictable, by use and age.", ROLE, USED_STATE, AGE
)
PAGE_BYTES = gauge("pdserve_worker_page_bytes", "Bytes of one KV page.", ROLE)
KV_UTILIZATION = gauge(
    "pdserve_worker_kv_utilization_ratio", "Pages neither free nor evictable over all pages, 0 to 1.", ROLE
)
LEASES = gauge(
    "pdserve_worker_leases", "Requests whose other worker must be heard of within one lease.", ROLE
)
CREDITS = gauge("pdserve_worker_credits", "Pages that may still be announced under the credit granted.", ROLE)
READY = gauge("pdserve_worker_ready", "1 if the worker takes requests; 0 too when it does not answer.", ROLE)
DRAINING = gauge("pdserve_worker_draining", "1 if the worker finishes what it has and takes no more.", ROLE)

PROMPT_TOKENS = counter(
    "pdserve_worker_prompt_tokens", "Prompt tokens by where this worker got their KV pages from.", ROLE,
    Label("source", PROMPT_SOURCES),
)  # fmt: skip
GENERATED_TOKENS = counter("pdserve_worker_generated_tokens", "Tokens made here.", ROLE)
TRANSFERS = counter(
    "pdserve_worker_transfers", "Requests whose pages were pulled, by how that ended.", ROLE, TRANSPORT,
    Label("outcome", TRANSFER_OUTCOMES),
)  # fmt: skip
TRANSFERRED_BYTES = counter(
    "pdserve_worker_transferred_bytes", "Bytes of pages that were pulled and verified.", ROLE, TRANSPORT
)
DIGEST_FAILURES = counter(
    "pdserve_worker_digest_failures", "Pages whose bytes did not have the announced digest.", ROLE
)
RESENT_PAGES = counter(
    "pdserve_worker_resent_pages",
    "Pages pulled once more, as the read before failed or brought changed bytes; what is computed instead "
    "does not count.",
    ROLE,
)
EVICTIONS = counter("pdserve_worker_evictions", "Pages taken from the prefix cache for new ones.", ROLE)
PREEMPTIONS = counter(
    "pdserve_worker_preemptions", "Sequences that lost their pages to others and start again.", ROLE
)
FENCED_MESSAGES = counter(
    "pdserve_worker_fenced_messages", "Messages of an older incarnation, try or request, ignored.", ROLE
)
REFUSALS = counter(
    "pdserve_worker_refusals", "Requests not taken, by why.", ROLE,
    Label("reason", tuple(str(reason) for reason in Refusal)),
)  # fmt: skip
EVENTS_TOTAL = counter(
    "pdserve_worker_events", "What else was counted, most of which should not happen.", ROLE,
    Label("event", EVENTS),
)  # fmt: skip

WORKER = (
    PREFILL_QUEUE, PREFILL_COMPUTE, TRANSFER, VERIFY, DECODE_QUEUE, STEP, STEP_SEQUENCES, STEP_ROWS,
    RUNNING, WAITING, WAITING_TOKENS, PAGES, USED_PAGES, PAGE_BYTES, KV_UTILIZATION, LEASES, CREDITS, READY,
    DRAINING,
    PROMPT_TOKENS, GENERATED_TOKENS, TRANSFERS, TRANSFERRED_BYTES, DIGEST_FAILURES, RESENT_PAGES, EVICTIONS,
    PREEMPTIONS, FENCED_MESSAGES, REFUSALS, EVENTS_TOTAL,
)  # fmt: skip
