"""Shared value types of the whole system. A leaf: it imports nothing of ours.

What lives here: names, parameters and records that cross component borders. What does not: messages
between processes (`pdserve.messages`), errors (`pdserve.errors`), anything with behaviour or I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a worker does. Both roles run the same engine; `aggregated` does prefill and decode itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class FinishReason(StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"


class HandoverMode(StrEnum):
    """Who computes the prompt of a request: another worker, or the decode worker itself."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """Authority over a request (protocol.md §3): ordered by (term, epoch) within one request id.

    request_id: minted by the router. term: the client's attach count. epoch: the router's try count.
    """

    request_id: str
    term: int = 0
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.term}.{self.epoch}"


class GrammarKind(StrEnum):
    """In which language a grammar is written; see the comments of common.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"


MAX_GRAMMAR_BYTES = 64 << 10
"""Of a grammar's text, in UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must conform to."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and its log-probability (natural) by the model's own distribution: before penalties, bias and
    temperature. top: the likeliest tokens at its place, best first. token: bytes of its text, for clients.
    """

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    token: bytes = b""


class Pooling(StrEnum):
    """How a text's hidden states become one vector."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters of one request. With the prompt and the completion so far they decide the
    next token: all of a request's sampling state follows from them.

    temperature: 0 is greedy. top_k: 0 is off. top_p, typical_p: 1 is off. min_p: 0 is off. seed: 64-bit.
    max_tokens: completion tokens at most, at least 1. stop_token_ids: besides the model's own end tokens.
    ignore_eos: the model's end tokens do not stop (benchmarks). repetition_penalty: 1 is off; counts tokens
    of prompt and completion. presence_penalty, frequency_penalty: 0 is off; count tokens of the completion.
    logit_bias: (token id, bias), each id once, ascending. min_tokens: no end or stop token before so many.
    bad_words: sequences of tokens that must not be made. logprobs: alternatives to each token's
    log-probability; None: no log-probabilities. grammar: what the output must conform to.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageName:
    """A page's full name: the pool (64 random bits), the page number and its generation (protocol.md §2)."""

    pool_id: int
    page: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model can take. All counts are tokens; end_token_ids stop a stream."""

    vocab_size: int
    max_context: int
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRecord:
    """What a worker can exchange with others, published at registration (protocol.md §3).

    layout: fingerprint of the page layout. numerics: how pages are computed (dtype, kernels, threads).
    model, tokenizer: hex digests. transports: names in order of preference. codecs: how page bytes may be
    encoded on the way ("raw": as they lie in the pool). protocol: (lowest, highest) page protocol spoken.
    pages: the layout in full (`kvtransfer.plan.record`); empty where it can not be described.
    """

    layout: str
    numerics: str
    model: str
    tokenizer: str
    dtype: str
    page_size: int
    page_bytes: int
    transports: tuple[str, ...]
    protocol: tuple[int, int] = (1, 1)
    codecs: tuple[str, ...] = ("raw",)
    pages: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRef:
    """How to reach a worker: control is host:port of gRPC, tcp that of the data plane; shm a Unix socket;
    nixl host:port#fingerprint of the memory it offers.

    shm, tcp and nixl are empty where the worker does not offer that transport; a worker of several ranks has
    an end for each, in order, with ";" between. layout, numerics: how its pages are cut (CapabilityRecord's
    `pages`) and computed; empty: as the reader's own.
    """

    worker_id: str
    incarnation: int
    control: str
    host_id: str = ""
    shm: str = ""
    tcp: str = ""
    nixl: str = ""
    layout: str = ""
    numerics: str = ""


class UsedState(StrEnum):
    """Pages that are neither free nor evictable, by what they are used for (protocol.md §2).

    granted: reserved, nothing written yet. held: sealed, with a holder besides the cache.
    """

    GRANTED = "granted"
    FILLING = "filling"
    HELD = "held"
    RETIRING = "retiring"
    QUARANTINED = "quarantined"


AGE_LIMITS_S = (1.0, 10.0, 60.0)
"""Ages of used pages are counted below each of these and above the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAges:
    """Pages in one use, by how long they have been: counts for ages below each of AGE_LIMITS_S, and above."""

    state: UsedState
    counts: tuple[int, ...]


REBALANCE_OUTCOMES = ("done", "rejected", "rolled_back", "copy_failed", "rank_lost")
"""How a placement of experts can end; WorkerLoad counts each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's state as its heartbeat tells it. Pages by state; tokens outstanding; sequences.

    page_ages: used pages by state and age. transfer_pages: held for transfers now; peak_transfer_pages: the
    most there ever were. rebalances: placements of experts by how they ended. expert_imbalance: the fullest
    ranks' load over the mean; 0 without load. lost_ranks: that the worker goes on without.
    expert_balance_loss: of its routers (`pdserve.layers.router_loss`), mean of layers; 0 without tokens.
    """

    num_pages: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    reserved_pages: int = 0
    filling_pages: int = 0
    sealed_pages: int = 0
    retiring_pages: int = 0
    quarantined_pages: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    draining: bool = False
    ready: bool = True
    page_ages: tuple[PageAges, ...] = ()
    transfer_pages: int = 0
    peak_transfer_pages: int = 0
    rebalances_done: int = 0
    rebalances_rejected: int = 0
    rebalances_rolled_back: int = 0
    rebalances_copy_failed: int = 0
    rebalances_rank_lost: int = 0
    expert_copied_bytes: int = 0
    expert_imbalance: float = 0.0
    lost_ranks: int = 0
    expert_balance_loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A registered worker: identity, role, address, capabilities and limits.

    metrics: host:port of its Prometheus metrics; empty: it serves none.
    """

    peer: PeerRef
    role: Role
    capability: CapabilityRecord
    limits: ModelLimits
    model_name: str
    pool_pages: int
    page_size: int
    pid: int = 0
    metrics: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. cached: prompt tokens taken from a prefix cache, wherever it lies."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What moved for one request: pages and bytes by wire, the transport's name, and pages already held.

    resent_pages: reads after a page's first, because that failed or brought changed bytes, as workers count
    them (`pdserve_worker_resent_pages_total`). A page that is given up and computed instead is none.
    """

    path: str = ""
    pages: int = 0
    bytes: int = 0
    hit_pages: int = 0
    resent_pages: int = 0


class Phase(StrEnum):
    """Where a request's time goes. Each span has a begin and an end stamp of its own, taken where it happens:

    tokenise       R: the request came · its prompt is token ids and it may queue
    queue          R: it may queue · a try's calls are about to be sent
    dispatch       R: a try's calls are about to be sent · P has the router's half and decode's grant
                   (computed locally: D has the reservation)
    prefill_queue  the worker that computes: ready for its next chunk (both halves there, or the chunk before
                   it computed) · that chunk's step begins
    compute        one chunk: its step begins · ends (its last page is sealed)
    announce       P: a page's chunk ended · D: the page's Announce arrived. On the path: the last page's, or
                   that of Finish when it comes later than the pages do
    wire           D: a page's Announce arrived · its bytes are in place
    verify         D: a page's bytes are in place · its digest is compared (shm digests while it copies)
    admit          D: the last page is verified and Finish is there (locally: the last chunk's step ended) ·
                   token 0 is on its way to the router: commit, publication and the scheduler's admission
    return         D: token 0 is on its way · R: it has come
    first_step     D: the step that makes token 1 begins · ends (after TTFT)
    """

    TOKENISE = "tokenise"
    QUEUE = "queue"
    DISPATCH = "dispatch"
    PREFILL_QUEUE = "prefill_queue"
    COMPUTE = "compute"
    ANNOUNCE = "announce"
    WIRE = "wire"
    VERIFY = "verify"
    ADMIT = "admit"
    RETURN = "return"
    FIRST_STEP = "first_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of a phase. begin_s, end_s: by the monotonic clock of the worker named begin_clock,
    end_clock ("" is the router's); in a router's ledger both by the router's, from the request's arrival.

    on_path: part of the way to the first token; those add up to TTFT. count: pages, or rows of a chunk.
    sum_s: of its parts' own lengths, as far as the two clocks agree.
    """

    phase: Phase
    begin_s: float
    end_s: float
    begin_clock: str = ""
    end_clock: str = ""
    on_path: bool = False
    count: int = 0
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """Stamps of a round trip: sent, answered by the worker's clock; received, replied by the router's."""

    sent_s: float
    received_s: float
    replied_s: float
    answered_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """A worker's monotonic clock as a router knows it: add offset_s to get the router's; plus or minus
    uncertainty_s."""

    worker: str
    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What each side did for one request; token counts say who computed the prompt. Seconds.

    spans: of all phases, see Span. clocks: what the router converted them with. ttft_s: as the router saw it,
    None before the first token. residual_s: ttft_s less the spans on its path. handover_s: from the last
    chunk computed to the first decode step begun. wire_hidden: share of the wire time that lies before the
    last chunk's end.
    """

    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_computed_tokens: int = 0
    prefill_cached_tokens: int = 0
    decode_computed_prompt_tokens: int = 0
    decode_hit_tokens: int = 0
    prefill_queue_s: float = 0.0
    prefill_compute_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    num_retractions: int = 0
    transfer: TransferStats = TransferStats()
    spans: tuple[Span, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()
    ttft_s: float | None = None
    residual_s: float | None = None
    handover_s: float | None = None
    wire_hidden: float | None = None
