"""Sums over a finished ledger. What lives here: reading one. What does not: making one (`router.ledger`)."""

from __future__ import annotations

from pdserve.types import Ledger, Phase


def path_seconds(ledger: Ledger) -> dict[Phase, float]:
    """Seconds by phase on the way to the first token, and those of the first step after it. Small negative
    ones come from the uncertainty of the clocks and count as 0."""
    sums: dict[Phase, float] = {}
    for span in ledger.spans:
        if span.on_path or span.phase is Phase.FIRST_STEP:
            sums[span.phase] = sums.get(span.phase, 0.0) + span.end_s - span.begin_s
    return {phase: max(0.0, seconds) for phase, seconds in sums.items()}
