"""What both roles measure of a prompt, as effects. Pure."""

from __future__ import annotations

from kvtransfer.effects import Effect, Measure
from kvtransfer.stamps import ComputeLog
from pdserve.obs.catalogue import worker as metrics


def prompt_tokens(source: str, count: int) -> list[Effect]:
    """So many tokens of a prompt came from there; see the catalogue."""
    if count <= 0:
        return []
    return [Measure(metric=metrics.PROMPT_TOKENS, value=count, labels=(source,))]


def prompt_computed(log: ComputeLog) -> list[Effect]:
    """A prompt was computed here, whole."""
    return [
        Measure(metric=metrics.PREFILL_QUEUE, value=log.queue_s),
        Measure(metric=metrics.PREFILL_COMPUTE, value=log.compute_s),
    ]
