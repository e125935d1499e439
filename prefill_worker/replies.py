"""Effects that the prefill role makes in more than one place, in short. Pure."""

from __future__ import annotations

from kvtransfer.effects import AnswerPrefill, ComputeDigest, ToDecoder
from kvtransfer.session import prefill_events as table
from pdserve.messages import Outcome, Refusal, Refused, TransferMessage
from pdserve.types import Key

MISMATCH = "the two halves are of different requests"


def refused(key: Key, reason: Refusal, detail: str) -> AnswerPrefill:
    """The router's half is not taken."""
    return AnswerPrefill(key=key, message=Refused(key=key, reason=reason, detail=detail))


def to_peer(peer: str, incarnation: int, message: TransferMessage) -> ToDecoder:
    """A message to a decode worker."""
    return ToDecoder(peer=peer, incarnation=incarnation, message=message)


def compute(key: Key, page: table.PHold | table.PRehash) -> ComputeDigest:
    """A page's bytes are to be digested."""
    return ComputeDigest(key=key, index=page.index, page=page.page, valid_rows=page.valid_rows)


def mismatch() -> table.Stop:
    """Ends a key whose halves carry tickets for other tokens or other sampling: one of them would be served
    with the other's text, and no page would show it where only the sampling differs."""
    return table.Stop(outcome=Outcome.NEVER_STARTED, detail=MISMATCH)


def never_started() -> table.Stop:
    """Ends a key whose other half is not taken: nothing was computed for it."""
    return table.Stop(outcome=Outcome.NEVER_STARTED, detail="the router's half is not taken here")


LOST = table.Stop(outcome=Outcome.EXPIRED, detail="decode does not know this key any more")
