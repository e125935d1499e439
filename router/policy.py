"""Which workers serve the next try: a pure function of the workers known, our own load and the request.

The least loaded pair (prefill, decode) by outstanding tokens; ties go to the least recently chosen. Decode
alone where the prompt is short, where no prefill worker can be used, or where a worker does both.
What does not live here: who is a member (`membership`), who is next (`admission`), counting (`inflight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtransfer.plan import Mixing, pairing_problem
from pdserve.types import PeerRef, Role, WorkerRecord
from router.inflight import InFlight

REQUEST_COST = 64
"""What a request costs besides its tokens, in tokens: a step of few rows takes as long as one of these."""

_EVALUATORS = (Role.PREFILL, Role.AGGREGATED, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """local_prefill_threshold: prompts with fewer tokens are computed on the decode worker; 0: never.

    prefill_backlog_tokens: a prefill worker with this much outstanding, and more than one request, gets no
    more; 0: no bound.
    """

    mixing: Mixing = "strict"
    local_prefill_threshold: int = 0
    prefill_backlog_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker as the policy sees it. usable: alive, ready, not draining, not suspect."""

    record: WorkerRecord
    usable: bool

    @property
    def incarnation(self) -> int:
        return self.record.peer.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the policy needs of a request. blocked: decode workers that said they are full, for now.

    pinned: the decode worker that has the prompt's pages; taken unless it is gone, full or has failed.
    """

    prompt_tokens: int
    avoid: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()
    pinned: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """prefill is None in local mode. reason: why, in words, for logs and tests."""

    decode: PeerRef
    prefill: PeerRef | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChoice:
    """Nobody can take it now. reason: in words. waits: capacity is what is missing, not members."""

    reason: str
    waits: bool


def choose(workers: Sequence[Candidate], load: InFlight, ask: Ask, config: PolicyConfig) -> Choice | NoChoice:
    """The workers of the next try. Changes nothing."""
    decodes = [w for w in workers if w.usable and w.record.role is not Role.PREFILL]
    if not decodes:
        return NoChoice(reason="no decode worker is ready", waits=False)
    free = [w for w in decodes if w.incarnation not in ask.blocked]
    if not free:
        return NoChoice(reason="every decode worker is full", waits=True)
    holder = next((w for w in free if w.incarnation == ask.pinned and w.incarnation not in ask.avoid), None)
    if holder is not None:
        return Choice(decode=holder.record.peer, prefill=None, reason="local: its pages are there")
    short = ask.prompt_tokens < config.local_prefill_threshold
    if short:
        return _local(free, load, ask, f"the prompt is below {config.local_prefill_threshold} tokens")
    return _joint(workers, free, load, ask, config)


def _joint(
    workers: Sequence[Candidate],
    decodes: Sequence[Candidate],
    load: InFlight,
    ask: Ask,
    config: PolicyConfig,
) -> Choice | NoChoice:
    """The best of all pairs that fit and of all workers that do both."""
    prefills = [w for w in workers if w.usable and w.record.role is Role.PREFILL]
    pairs: list[tuple[Candidate, Candidate]] = []
    problem = "none is ready"
    for decode in decodes:
        if decode.record.role is Role.AGGREGATED:
            pairs.append((decode, decode))
            continue
        for prefill in prefills:
            found = _problem(prefill, decode, config)
            if found is None:
                pairs.append((prefill, decode))
            problem = found or problem
    if not pairs:
        return _local(decodes, load, ask, f"no prefill worker can be used: {problem}")
    open_pairs = [pair for pair in pairs if _has_room(pair[0], load, config)]
    if not open_pairs:
        return NoChoice(reason="every prefill worker has its backlog", waits=True)
    prefill, decode = min(open_pairs, key=lambda pair: _cost(pair, load, ask))
    if prefill is decode:
        return Choice(decode=decode.record.peer, prefill=None, reason="local: the worker does both")
    reason = "disaggregated: the pair with the least outstanding tokens"
    return Choice(decode=decode.record.peer, prefill=prefill.record.peer, reason=reason)


def choose_evaluator(
    workers: Sequence[Candidate], load: InFlight, avoid: frozenset[int], near: int | None = None
) -> PeerRef | None:
    """Who runs a text through the model and generates nothing, or None: prefill workers first, as they take
    it for one more prompt; among equals the one with the least to compute. near: who goes before all."""

    def cost(worker: Candidate) -> tuple[int, ...]:
        now = load.load(worker.incarnation)
        tokens = now.prefill_tokens + REQUEST_COST * now.prefill_requests
        order = _EVALUATORS.index(worker.record.role)
        return (int(worker.incarnation != near), order, tokens, load.last_chosen(worker.incarnation))

    usable = (worker for worker in workers if worker.usable and worker.incarnation not in avoid)
    best = min(usable, key=cost, default=None)
    return None if best is None else best.record.peer


def choose_prefill(
    workers: Sequence[Candidate], load: InFlight, decode: PeerRef, avoid: frozenset[int], config: PolicyConfig
) -> PeerRef | None:
    """Another prefill worker for a decode worker that already holds pages for the request, or None."""
    holder = next((w for w in workers if w.incarnation == decode.incarnation and w.usable), None)
    if holder is None:
        return None
    fitting = [
        w
        for w in workers
        if w.usable and w.record.role is Role.PREFILL and w.incarnation not in avoid
        if _has_room(w, load, config) and _problem(w, holder, config) is None
    ]
    none = Ask(prompt_tokens=0)
    best = min(fitting, key=lambda worker: _cost((worker, holder), load, none), default=None)
    return None if best is None else best.record.peer


def _problem(prefill: Candidate, decode: Candidate, config: PolicyConfig) -> str | None:
    """Why these two can not exchange pages, or None."""
    return record_problem(prefill.record, decode.record, config.mixing)


def record_problem(prefill: WorkerRecord, decode: WorkerRecord, mixing: Mixing) -> str | None:
    """Why these two workers can not exchange pages, as a sentence; None if they can."""
    here = prefill.peer.host_id == decode.peer.host_id
    return pairing_problem(prefill.capability, decode.capability, mixing, same_host=here)


def _has_room(prefill: Candidate, load: InFlight, config: PolicyConfig) -> bool:
    if prefill.record.role is Role.AGGREGATED or not config.prefill_backlog_tokens:
        return True
    now = load.load(prefill.incarnation)
    return now.prefill_requests < 2 or now.prefill_tokens < config.prefill_backlog_tokens


def _cost(pair: tuple[Candidate, Candidate], load: InFlight, ask: Ask) -> tuple[int, ...]:
    prefill, decode = pair
    p, d = load.load(prefill.incarnation), load.load(decode.incarnation)
    return (
        int(prefill.incarnation in ask.avoid) + int(decode.incarnation in ask.avoid),
        p.prefill_tokens + REQUEST_COST * p.prefill_requests,
        d.decode_tokens + REQUEST_COST * d.decode_requests,
        load.last_chosen(prefill.incarnation),
        load.last_chosen(decode.incarnation),
    )


def _local(decodes: Sequence[Candidate], load: InFlight, ask: Ask, reason: str) -> Choice:
    best = min(decodes, key=lambda worker: _cost((worker, worker), load, ask))
    return Choice(decode=best.record.peer, prefill=None, reason=f"local: {reason}")


def pairing_problems(records: Mapping[int, WorkerRecord], mixing: Mixing) -> tuple[str, ...]:
    """Why pairs of the workers known can not be used together, in words, each reason once."""
    prefills = [r for r in records.values() if r.role is Role.PREFILL]
    decodes = [r for r in records.values() if r.role is Role.DECODE]
    found: dict[str, None] = {}
    for prefill in prefills:
        for decode in decodes:
            problem = record_problem(prefill, decode, mixing)
            if problem is not None:
                found[f"{prefill.peer.worker_id} with {decode.peer.worker_id}: {problem}"] = None
    return tuple(found)
