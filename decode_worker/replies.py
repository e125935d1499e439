"""What the decode role answers where no decision is left to make. Pure."""

from __future__ import annotations

from decode_worker.entry import Entry
from kvtransfer.effects import AnswerDecode, Effect, ToPrefiller
from kvtransfer.session import decode_events as table
from pdserve.messages import (
    Abort,
    Announce,
    Commit,
    Finish,
    Outcome,
    Refusal,
    Refused,
    Reserved,
    TransferMessage,
)
from pdserve.types import Key


def superseded() -> table.Stop:
    """Ends a key because a higher one of its request was taken."""
    message = "a newer try of this request took over"
    return table.Stop(label="cancelled", message=message, retryable=False, outcome=Outcome.SUPERSEDED)


def refused(key: Key, reason: Refusal, detail: str, *, retry_after_s: float = 0.0) -> AnswerDecode:
    """The request is not taken."""
    message = Refused(key=key, reason=reason, detail=detail, retry_after_s=retry_after_s)
    return AnswerDecode(key=key, message=message)


def repeated(entry: Entry, page_size: int) -> list[Effect]:
    """Guard 4: the live key's Reserve again, on another stream. What was said is said again."""
    key = entry.session.key
    if not entry.session.live:
        return [refused(key, Refusal.OUTDATED_KEY, f"this try is over: {entry.session.outcome}")]
    reserved = Reserved(key=key, mode=entry.held.mode, hit_tokens=entry.held.hit_pages * page_size)
    again = [AnswerDecode(key=key, message=token) for token in entry.tokens]
    return [AnswerDecode(key=key, message=reserved), *again]


def unknown(
    peer: str, incarnation: int, message: Announce | Finish | Abort, recorded: Outcome | None
) -> list[Effect]:
    """P talks about a key that is not live here: definitive, as P announces only after Grant."""
    if isinstance(message, Abort):
        return []
    reply: TransferMessage = Abort(key=message.key, outcome=recorded or Outcome.UNKNOWN)
    if recorded is Outcome.COMPLETE:
        reply = Commit(key=message.key)
    return [ToPrefiller(peer=peer, incarnation=incarnation, message=reply)]
