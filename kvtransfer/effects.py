"""What a worker's pure core asks its driver to do, as data. A leaf: only shared types are imported.

The driver (asyncio, gRPC, torch) and the simulator carry these out; nothing else touches the outside.
`SetGenerations` must be carried out before any later effect of the same list.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.messages import Ended, Evaluated, Prefilled, Refused, Reserved, Token, TransferMessage
from pdserve.obs.catalogue.kinds import Metric
from pdserve.sched.plan import StepPlan
from pdserve.types import Key, PageName, PeerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ToDecoder:
    """The prefill role sends to a decode worker over the pair's exchange stream. May be lost; repeated."""

    peer: str
    incarnation: int
    message: TransferMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPrefiller:
    """The decode role sends to a prefill worker over the pair's exchange stream. May be lost; repeated."""

    peer: str
    incarnation: int
    message: TransferMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPrefill:
    """The prefill role answers the router's open Prefill call for this key; that closes it."""

    key: Key
    message: Refused | Prefilled


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDecode:
    """The decode role answers the router's open Reserve call for this key; Refused and Ended close it."""

    key: Key
    message: Reserved | Refused | Token | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvaluate:
    """The evaluate role answers a router's open Evaluate call; an error is its status."""

    call_id: str
    result: Evaluated | PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Make sure an exchange stream to this prefill worker exists."""

    peer: PeerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """What becomes of a page of another layout: it is read into memory of its own, and once it is verified
    its rows go to these pages of ours, on all ranks.

    layout: the source's, as text. span_page: which page of its span it is. num_tokens: of the prompt in that
    span. targets: (page of the span, our page), those that it has rows of. held: pages of the span, by our
    size, that are there already and must not be written.
    """

    layout: str
    span_page: int
    num_tokens: int
    targets: tuple[tuple[int, int], ...]
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRead:
    """Pull one page of the peer's pool into `target_page` of ours, then report ReadDone(read_id).

    rank: whose part of the page it is; digest: of that part. num_ranks: of the peer. relay: the page is of
    another layout; then `target_page` is the first of the pages that it goes to. blank: pages of ours to
    clear before anything else: no page of the peer has all of their rows.
    """

    read_id: int
    peer: PeerRef
    key: Key
    ticket: bytes
    source: PageName
    index: int
    valid_rows: int
    digest: bytes
    target_page: int
    rank: int = 0
    num_ranks: int = 1
    relay: Relay | None = None
    blank: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRead:
    """Drop a read that has not begun. Its ReadDone still comes, exactly once."""

    read_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDigest:
    """Digest our own page for this key; answered by a Digested event."""

    key: Key
    index: int
    page: PageName
    valid_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Execute the plan on the compute thread; answered by a StepResult."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGenerations:
    """Write page generations into the mapped header, before any new byte of those pages."""

    updates: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """This incarnation is over: end the process at once, saying nothing more; the fleet starts a new one."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Add to an event's counter. `name` comes from the closed set `pdserve.obs.catalogue.worker.EVENTS`, or
    is one of those that `pdserve.worker.metrics` has a metric for."""

    name: str
    amount: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Add to a declared metric: an amount to a counter, an observation to a histogram. labels: the values of
    its labels in order, without the worker's role."""

    metric: Metric
    value: float = 1.0
    labels: tuple[str, ...] = ()


Effect = (
    ToDecoder
    | ToPrefiller
    | AnswerPrefill
    | AnswerDecode
    | AnswerEvaluate
    | Dial
    | StartRead
    | CancelRead
    | ComputeDigest
    | RunStep
    | SetGenerations
    | Count
    | Measure
    | Retire
)
