"""Events and effects of the prefill side's state machine (`kvtransfer.session.prefill`), as data."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from pdserve.types import FinishReason, PageName, TokenLogprob

# ---- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillHalf:
    """The router's half arrived; the request is to be handed over by `deadline_at` (local clock)."""

    deadline_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The scheduler started (or restarted) the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Page `index` is full (or the tail) and sealed under `page`; digest: what it had when it was sealed, if
    it comes from the cache."""

    index: int
    page: PageName
    valid_rows: int
    content_key: bytes
    digest: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Digested:
    """The digest of a page that was asked for."""

    index: int
    page: PageName
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptedEvent:
    """The sequence lost its pages and waits again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The prompt is done and token `index` sampled; finish is set if the request ends with it. logprob: if
    the request asks for it."""

    index: int
    token_id: int
    finish: FinishReason | None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The decode worker says that it still holds this key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Cancel, deadline, error, lost lease, drain or a higher key: end with this outcome."""

    outcome: Outcome
    detail: str = ""
    tell_peer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeQuiet:
    """No step computes on this request's pages any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Only delivered after the inbox is drained past the expiry."""


PEvent = (
    PrefillHalf | Scheduled | Sealed | Digested | PreemptedEvent | FirstToken | Renewed | Stop | ComputeQuiet
    | Tick | Grant | Ack | Nack | Commit | Abort
)  # fmt: skip

# ---- effects -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PSend:
    """Send to the decode worker of this key."""

    message: Announce | Finish | Abort


@dataclass(frozen=True, slots=True, kw_only=True)
class PQueue:
    """Both halves are here: submit the sequence to the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PHold:
    """Take the transfer holder on a page and have it digested."""

    index: int
    page: PageName
    valid_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PRehash:
    """Digest the page's bytes as they are now; answered by Digested."""

    index: int
    page: PageName
    valid_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PDrop:
    """Drop the transfer holder of one page."""

    index: int
    page: PageName


@dataclass(frozen=True, slots=True, kw_only=True)
class PDropRequest:
    """Drop the request holders (compute is over, or was stopped)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PStopCompute:
    """Take the sequence out of the scheduler; answered by ComputeQuiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PUnpublish:
    """The page's bytes are bad here: unpublish it and every page chained after it."""

    page: PageName


@dataclass(frozen=True, slots=True, kw_only=True)
class PReport:
    """Answer the router: this side's part is over."""

    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PDone:
    """Leave a tombstone with this outcome; the session can be forgotten."""

    outcome: Outcome


PEffect = (
    PSend | PQueue | PHold | PRehash | PDrop | PDropRequest | PStopCompute | PUnpublish | PReport | PDone
)
