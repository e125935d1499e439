"""A finished request as the JSON object that `pdserve generate --json` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from pdserve.client import Result
from pdserve.errors import PdserveError
from pdserve.obs.ledger import path_seconds
from pdserve.types import Ledger


def answer(result: Result, label: Any = None) -> dict[str, Any]:
    """Text, tokens, usage, seconds by phase, workers, and what was transferred. label: the id of the line."""
    ledger = result.ledger
    return {
        "id": label,
        "request_id": result.request_id,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": str(result.finish_reason),
        "usage": dataclasses.asdict(result.usage),
        "timings": {
            **dataclasses.asdict(result.timings),
            "prefill_queue_s": ledger.prefill_queue_s,
            "prefill_s": ledger.prefill_compute_s,
            "transfer_s": ledger.transfer_s,
            "decode_s": ledger.decode_s,
        },
        "workers": {"prefill": ledger.prefill_worker, "decode": ledger.decode_worker},
        "transfer": dataclasses.asdict(ledger.transfer),
        "ledger": ledger_of(ledger),
        "computed": {
            "prefill_prompt_tokens": ledger.prefill_computed_tokens,
            "prefill_cached_tokens": ledger.prefill_cached_tokens,
            "decode_prompt_tokens": ledger.decode_computed_prompt_tokens,
            "decode_hit_tokens": ledger.decode_hit_tokens,
        },
        "retractions": ledger.num_retractions,
        "epochs": result.epochs,
    }


def ledger_of(ledger: Ledger) -> dict[str, Any]:
    """The latency ledger: seconds by phase on the way to the first token, and every span."""
    return {
        "ttft_s": ledger.ttft_s,
        "residual_s": ledger.residual_s,
        "phases": {str(phase): seconds for phase, seconds in path_seconds(ledger).items()},
        "handover_s": ledger.handover_s,
        "wire_hidden": ledger.wire_hidden,
        "clocks": [dataclasses.asdict(clock) for clock in ledger.clocks],
        "spans": [dataclasses.asdict(span) for span in ledger.spans],
    }


def failure(error: PdserveError, label: Any = None) -> dict[str, Any]:
    """The object of a request that failed."""
    return {"id": label, "error": {"label": error.label, "message": error.message}}
