"""Messages between our processes as plain data, before they meet protobuf (`pdserve.rpc.convert`).

Names follow protocol.md §4. R is the router, P a prefill worker, D a decode worker. Durations are
remaining seconds, never wall time. Every P-D message travels in an `Envelope`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.types import (
    FinishReason,
    HandoverMode,
    Key,
    Ledger,
    PageName,
    PeerRef,
    Pooling,
    SamplingParams,
    TokenLogprob,
    Usage,
)


class Refusal(StrEnum):
    """Why a worker does not take a request. Nothing was started."""

    FULL = "full"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"
    STALE_INCARNATION = "stale_incarnation"
    BAD_TICKET = "bad_ticket"
    NEVER_FITS = "never_fits"
    OUTDATED_KEY = "outdated_key"


class Outcome(StrEnum):
    """Answers to Cancel and Abort (protocol.md §4)."""

    NEVER_STARTED = "never_started"
    STOPPING = "stopping"
    STOPPED = "stopped"
    COMPLETE = "complete"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    SOURCE_CORRUPT = "source_corrupt"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """R → D: take this request. `token_ids` are the prompt followed by `num_forced` tokens already delivered.

    prefill is None exactly in local mode. ticket: see kvtransfer.ticket. deadline_s: what is left of it.
    cache_salt: not empty: its pages are shared only with calls of the same tenant and salt.
    """

    key: Key
    receiver_incarnation: int
    ticket: bytes
    token_ids: tuple[int, ...]
    num_forced: int
    sampling: SamplingParams
    tenant: str
    mode: HandoverMode
    prefill: PeerRef | None
    deadline_s: float
    priority: int = 0
    use_prefix_cache: bool = True
    trace_id: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """D → R: pages are held. mode may differ from what was asked: D chose to prefill locally."""

    key: Key
    mode: HandoverMode
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """D or P → R: not taken, nothing started."""

    key: Key
    reason: Refusal
    detail: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """D → R: one token. index counts completion tokens from 0, forced ones included.

    ledger: with the first token of a try, what was done until then. logprob: if the request asks for it.
    """

    key: Key
    index: int
    token_id: int
    ledger: Ledger | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """D → R: the one terminal status. Exactly one of finish and error_label is set.

    retryable: R may mint a new epoch (nothing wrong with the request itself).
    """

    key: Key
    finish: FinishReason | None
    error_label: str = ""
    error_message: str = ""
    retryable: bool = False
    usage: Usage = Usage()
    ledger: Ledger = Ledger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """R → P: compute this prompt and hand it to `decode`. Sent at the same time as Reserve."""

    key: Key
    receiver_incarnation: int
    ticket: bytes
    token_ids: tuple[int, ...]
    num_forced: int
    sampling: SamplingParams
    tenant: str
    decode: PeerRef
    deadline_s: float
    priority: int = 0
    use_prefix_cache: bool = True
    trace_id: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """P → R: the end of P's part. outcome COMPLETE means D committed; others say why not."""

    key: Key
    outcome: Outcome
    detail: str = ""
    ledger: Ledger = Ledger()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateParams:
    """What is asked of tokens that are only run through the model; exactly one of num_top and pooling is set.

    num_top: log-probabilities of the tokens from from_index on, with so many alternatives; from_index is at
    least 1. pooling: a vector of the hidden states after the final norm.
    """

    num_top: int | None = None
    from_index: int = 1
    pooling: Pooling | None = None

    def first_row(self, num_tokens: int) -> int:
        """The first of the rows that the answer is made of; those before it may come from a cache."""
        if self.pooling is None:
            return self.from_index - 1
        return 0 if self.pooling is Pooling.MEAN else num_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """R → P or D: run these tokens through the model, generate nothing. tenant: whose prefixes these are.
    cache_salt: see Reserve."""

    receiver_incarnation: int
    token_ids: tuple[int, ...]
    tenant: str
    params: EvaluateParams
    priority: int = 0
    use_prefix_cache: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The answer: a log-probability for each token asked for, or a vector in float32, not normalised.
    cached_tokens: leading ones that came from the prefix cache."""

    logprobs: tuple[TokenLogprob, ...] = ()
    vector: tuple[float, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """D or P → R: what is known of a live key, when R asks. doing: what it does or waits for, in words."""

    doing: str
    ledger: Ledger


# ---- P ↔ D, over TransferService.Exchange ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """D → P: the page indices D lacks and how many P may announce in all (absolute, monotone).

    `ticket` repeats R's, so that P can check this half on its own.
    """

    key: Key
    want: tuple[int, ...]
    credit: int
    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """P → D: page `index` of the prompt is sealed under `page`, with its content key and byte digest.

    sealed_s: when it was sealed, by P's monotonic clock (for the ledger only).
    """

    key: Key
    index: int
    page: PageName
    valid_rows: int
    content_key: bytes
    digest: bytes
    sealed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """D → P: page verified."""

    key: Key
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """D → P: bytes do not match the digest although the generation did not change."""

    key: Key
    index: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """P → D: first token and sampler state, with a digest over all digests announced in this epoch.

    token_id has completion index `index` (= num_forced). next_counter: the sampler's next counter value.
    finish: set if the request ended with this token. logprob: the token's, if the request asks for it.
    """

    key: Key
    index: int
    token_id: int
    next_counter: int
    finish: FinishReason | None
    num_announced: int
    digest_of_digests: bytes
    ledger: Ledger = Ledger()
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """D → P: everything is verified and held; D owns the request."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """P ↔ D: these keys are alive here. Answered with the subset known there (`answer` True)."""

    keys: tuple[Key, ...]
    answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """P ↔ D: this transfer ends here. A transfer abort never ends the request by itself."""

    key: Key
    outcome: Outcome
    detail: str = ""


TransferMessage = Grant | Announce | Ack | Nack | Finish | Commit | Renew | Abort


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One P-D message with the sender's and receiver's identity. A wrong receiver incarnation is refused."""

    sender: str
    sender_incarnation: int
    receiver_incarnation: int
    message: TransferMessage
