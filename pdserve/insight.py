"""What is asked about a router, its fleet and single requests, as plain data; a leaf like `pdserve.api`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.types import Ledger, ModelLimits, Usage, WorkerLoad, WorkerRecord

_NO_USAGE, _NO_LEDGER = Usage(), Ledger()


def worker_state(load: WorkerLoad, *, suspect: bool) -> str:
    """What a router thinks of a worker, in a word: "suspect", "draining", "ready" or "not ready"."""
    if suspect:
        return "suspect"
    if load.draining:
        return "draining"
    return "ready" if load.ready else "not ready"


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

    @property
    def state(self) -> str:
        """See `worker_state`."""
        return worker_state(self.load, suspect=self.suspect)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsHistogram:
    """counts[i]: of values at most bounds[i] and above the bound before it; the last: above all of them."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum: float = 0.0


_NO_SECONDS = SecondsHistogram()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a router did since it started; only grows. completion_tokens: those that went to clients.
    failed_requests: ended in an error or cancelled."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    ttft: SecondsHistogram = _NO_SECONDS
    itl: SecondsHistogram = _NO_SECONDS


_NO_TRAFFIC = Traffic()


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
    traffic: Traffic = _NO_TRAFFIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where one request's time went so far. It holds no prompt and no text.

    state: "queued", "reserving", "reserved", "running", "stopping" or "done". waiting_for: what it waits for
    now, in words. outcome: a finish reason or an error label, "" before the end; message: the error's own.
    age_s: seconds since it came. total_s: what it took, once done. choice_ids: what its other choices can be
    explained by.
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
    choice_ids: tuple[str, ...] = ()


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
