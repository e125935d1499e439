"""The public inference API as plain data: what a client asks and what it gets back.

What lives here: the dataclasses the SDK and the router share, before they meet protobuf
(`pdserve.rpc.convert.public`). What does not: messages between our own processes (`pdserve.messages`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.types import FinishReason, Ledger, ModelLimits, Usage, WorkerLoad, WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """Sampling as asked; None takes the server's documented default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInput:
    """One request as asked, not yet validated. Exactly one of prompt, messages and token_ids is not None.

    deadline_s: seconds from now, 0 takes the default. priority: lower is served first.
    """

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingInput = SamplingInput()
    stop: tuple[str, ...] = ()
    deadline_s: float = 0.0
    priority: int = 0
    client_request_id: str = ""
    no_prefix_cache: bool = False
    trace_id: str = ""
    no_text: bool = False
    resume_window_s: float = 0.0
    n: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """First event of a stream: the id the router knows the request by."""

    request_id: str
    client_request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that arrived together. index: of the first one among the completion tokens.

    text: what became complete with these tokens; never half a character.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds spent on the router's side of one request."""

    queue_s: float = 0.0
    tokenise_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


_NO_USAGE, _NO_TIMINGS, _NO_LEDGER = Usage(), Timings(), Ledger()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Last event of a stream that ended without an error. epochs: tries it took, 1 when nothing failed."""

    finish_reason: FinishReason
    usage: Usage = _NO_USAGE
    timings: Timings = _NO_TIMINGS
    ledger: Ledger = _NO_LEDGER
    epochs: int = 1


StreamEvent = Admitted | Chunk | End


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model a router serves."""

    model: str
    limits: ModelLimits
    has_chat_template: bool
    dtype: str
    model_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as one router sees it. outstanding: sent there by this router and not yet seen to end."""

    record: WorkerRecord
    load: WorkerLoad
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    heartbeat_age_s: float = 0.0
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A router's view of the fleet. pairing_problems: why pairs of workers can not be used together."""

    router_id: str
    workers: tuple[WorkerStatus, ...]
    queued: int
    running: int
    uptime_s: float
    draining: bool
    pairing_problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where one request's time went so far. It holds no prompt and no text.

    state: "queued", "reserving", "reserved", "running", "stopping" or "done". waiting_for: what it waits for
    now, in words. outcome: a finish reason or an error label, "" before the end; message: the error's own.
    age_s: seconds since it came. total_s: what it took, once done.
    """

    request_id: str
    state: str
    client_request_id: str = ""
    waiting_for: str = ""
    outcome: str = ""
    message: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    usage: Usage = _NO_USAGE
    max_tokens: int = 0
    epochs: int = 0
    age_s: float = 0.0
    total_s: float = 0.0
    ledger: Ledger = _NO_LEDGER


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReport:
    """Loads and homes of one worker's experts. The fields are those of a snapshot (docs/placement.md).

    layers: the model's numbers of the layers that have experts. loads: by such layer and expert, tokens of a
    decayed window. homes: by layer and expert, its (slot, share) pairs. rebalancing: they change now.
    last_rebalance: how the last change ended, in words. balance_losses: by layer, the auxiliary loss of its
    router (1: even); 0 without tokens.
    """

    name: str
    layers: tuple[int, ...] = ()
    loads: tuple[tuple[float, ...], ...] = ()
    nodes: int = 1
    ranks_per_node: int = 1
    lost_ranks: tuple[int, ...] = ()
    slots_per_rank: int = 0
    homes: tuple[tuple[tuple[tuple[int, float], ...], ...], ...] = ()
    rebalancing: bool = False
    last_rebalance: str = ""
    balance_losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceAnswer:
    """What a worker says when it is asked to place its experts anew. reason: why not, in words. copies: of
    weights. gain: part of the fullest ranks' load that is saved, 0 to 1.
    """

    name: str
    started: bool
    reason: str = ""
    copies: int = 0
    gain: float = 0.0
