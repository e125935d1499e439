"""Groups of label values that several panels and the alerts speak of. Regular expressions of PromQL."""

from __future__ import annotations

FINISHED = "stop|length"
"""Outcomes of requests that were answered in full."""
REFUSED = (
    "invalid_request|prompt_too_long|unsupported|never_fits|unknown_model|unknown_request|"
    "unauthenticated|permission_refused"
)
"""Outcomes that the caller has to put right."""
SHED = "overloaded"
"""Outcomes of requests that came when there was no room."""
CANCELLED = "cancelled"
"""Outcomes of requests that nobody waits for any more."""
FAILED = (
    "internal|unavailable|worker_lost|draining|deadline_expired|stale_incarnation|incompatible|"
    "model_error|config_error"
)
"""Outcomes that are our fault: the error rate counts these."""

OUTCOME_GROUPS = {
    "finished": FINISHED,
    "refused": REFUSED,
    "shed": SHED,
    "cancelled": CANCELLED,
    "failed": FAILED,
}
"""Every outcome of a request is in exactly one of these."""
