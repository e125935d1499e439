"""What the decode role says in more than one place, in short. Pure."""

from __future__ import annotations

from kvtransfer.effects import AnswerDecode
from kvtransfer.session import decode_events as table
from pdserve.messages import Outcome, Refusal, Refused
from pdserve.types import Key


def superseded() -> table.Stop:
    """Ends a key because a higher one of its request was taken."""
    message = "a newer try of this request took over"
    return table.Stop(label="cancelled", message=message, retryable=False, outcome=Outcome.SUPERSEDED)


def refused(key: Key, reason: Refusal, detail: str, *, retry_after_s: float = 0.0) -> AnswerDecode:
    """The request is not taken."""
    message = Refused(key=key, reason=reason, detail=detail, retry_after_s=retry_after_s)
    return AnswerDecode(key=key, message=message)
