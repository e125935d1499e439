"""What can happen to a request and what the router then does, as data. No behaviour.

`lifecycle.step` turns events into effects; `router.request` feeds the one and carries out the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messages import Ended, Outcome, Prefilled, Refused, Reserved, Token
from pdserve.types import FinishReason, HandoverMode, Key, Ledger, PeerRef, TokenLogprob, Usage

# ---- events ------------------------------------------------------------------------------------------
# From D: Reserved, Refused, Token, Ended. From P: Prefilled, PrefillRefused.


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The policy chose workers for the next try. prefill is None exactly in local mode."""

    decode: PeerRef
    prefill: PeerRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebound:
    """The answer to Rebind: another prefill worker for the same decode worker, or None."""

    key: Key
    prefill: PeerRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRefused:
    """P does not take its part; nothing was started there."""

    refused: Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBroken:
    """The call to D failed, or ended without an Ended. label, message: for the client if no try is left.

    retryable: the fault may not be the request's.
    """

    key: Key
    label: str
    message: str
    retryable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBroken:
    """The call to P failed."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchAnswered:
    """D's answer to SwitchLocal; None: the call failed."""

    key: Key
    outcome: Outcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """Membership has given a worker's incarnation up."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """A stop text was found in the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettled:
    """D had its time to report after a stop; go on without its ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """The queue gives this request up."""

    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """The client cancelled or disconnected; nobody hears the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAsked:
    """Abort was called, or the router shuts down (then label is "draining")."""

    label: str = "cancelled"
    message: str = "The request was aborted."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineHit:
    """The request's deadline passed."""


Event = (
    Assigned
    | Rebound
    | Reserved
    | Refused
    | Token
    | Ended
    | Prefilled
    | PrefillRefused
    | DecodeBroken
    | PrefillBroken
    | SwitchAnswered
    | WorkerGone
    | StopMatched
    | StopSettled
    | Shed
    | ClientGone
    | AbortAsked
    | DeadlineHit
)

# ---- effects -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReserve:
    """Call Reserve on `decode`. token_ids: prompt, then `num_forced` tokens already delivered."""

    key: Key
    decode: PeerRef
    prefill: PeerRef | None
    mode: HandoverMode
    token_ids: tuple[int, ...]
    num_forced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrefill:
    """Call Prefill on `prefill`, at the same time as the SendReserve before it."""

    key: Key
    decode: PeerRef
    prefill: PeerRef
    token_ids: tuple[int, ...]
    num_forced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelDecode:
    """Tell D to stop this key. keep_stream: read on until D's Ended (for its ledger)."""

    key: Key
    decode: PeerRef
    keep_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelPrefill:
    """Tell P to stop this key."""

    key: Key
    prefill: PeerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebind:
    """P has started nothing: look for another one that fits this decode worker, which keeps its reservation.
    Answered by Rebound. avoid: incarnations not to choose."""

    key: Key
    decode: PeerRef
    avoid: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLocal:
    """Tell D that P is gone; answered by SwitchAnswered."""

    key: Key
    decode: PeerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Completion token `index` goes to the client. Every index once, in order. logprob: if asked for."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecode:
    """This key no longer loads its decode worker."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePrefill:
    """This key no longer loads its prefill worker."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Back into the queue for another try. avoid: incarnations to use only if there are no others.

    blocked: the incarnation of a decode worker that said it is full or draining; block_s: for how long to
    believe it, unless one of our own requests ends there before.
    """

    avoid: frozenset[int]
    blocked: int | None = None
    block_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveQueue:
    """The request waits no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStream:
    """The one terminal status. Exactly one of finish and label is set.

    discarded: tokens that D made after a stop text had matched.
    """

    finish: FinishReason | None
    label: str = ""
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage
    ledger: Ledger
    epochs: int
    discarded: int


Effect = (
    SendReserve
    | SendPrefill
    | CancelDecode
    | CancelPrefill
    | Rebind
    | SwitchLocal
    | Emit
    | ReleaseDecode
    | ReleasePrefill
    | Requeue
    | LeaveQueue
    | EndStream
)
