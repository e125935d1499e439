"""Events and effects of the decode side's state machine (`kvtransfer.session.decode`), as data."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.transport import ReadStatus
from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from pdserve.types import FinishReason, HandoverMode, TokenLogprob

# ---- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request was taken: pages are reserved, prefix hits held. Indices from hit_pages on are lacking,
    save those in `verified`, which came by wire for a lower key of this request (protocol.md §9, guard 3).
    All counts are in pages of the prefill worker, which may be of another size than ours.
    """

    mode: HandoverMode
    num_pages: int
    hit_pages: int
    ticket: bytes
    deadline_at: float
    num_forced: int
    max_tokens: int
    verified: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEnded:
    """The local transport reports that a read of one part ended; it touches nothing any more. rank: which of
    the parts that make the page."""

    index: int
    status: ReadStatus
    digest: bytes
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongPage:
    """The announced page is not the one that our own token ids ask for (content key); no read was begun."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Our own engine made completion token `index`. logprob: if the request asks for it."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The sequence ended by itself."""

    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The prefill side is lost (the router says so, or its lease is over): go on locally."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Cancel, deadline, error or a higher key: end with an error."""

    label: str
    message: str
    retryable: bool
    outcome: Outcome = Outcome.STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen:
    """The prefill worker says that it knows this key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeQuiet:
    """No step computes on this request's pages any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Only delivered after the inbox is drained past the expiry."""


DEvent = (
    Accepted | ReadEnded | WrongPage | Sampled | Finished | Switch | Stop | PeerSeen | ComputeQuiet | Tick
    | Announce | Finish | Abort
)  # fmt: skip

# ---- effects -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DSend:
    """Send to the prefill worker of this key."""

    message: Grant | Ack | Nack | Commit | Abort


@dataclass(frozen=True, slots=True, kw_only=True)
class DRead:
    """Pin what this page's rows go to and start to pull it, every part; WrongPage if its content key
    differs."""

    announce: Announce


@dataclass(frozen=True, slots=True, kw_only=True)
class DCancelReads:
    """Cancel reads of this key that have not begun; each still ends with ReadEnded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DRun:
    """All pages are verified: seal and publish the full ones, submit the sequence with its first token."""

    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class DRunLocal:
    """Submit the sequence to our own engine; the first `verified_pages` pages of the prompt (as prefill
    counts them) are good."""

    verified_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DEmit:
    """A token for the client."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DEnd:
    """The one terminal status."""

    finish: FinishReason | None
    label: str = ""
    message: str = ""
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DStopCompute:
    """Take the sequence out of the scheduler; answered by ComputeQuiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDropPages:
    """The request is over, but reads are not: drop its holders; pinned pages stay until their read ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DRelease:
    """Compute and reads are quiet: drop the request holders, leave a tombstone, forget the session."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class DCount:
    """Something that must not happen between our own processes did: add to this counter."""

    name: str


DEffect = (
    DSend | DRead | DCancelReads | DRun | DRunLocal | DEmit | DEnd | DStopCompute | DDropPages | DRelease
    | DCount
)  # fmt: skip
