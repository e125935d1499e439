"""Builds the engine of a worker: model, page pool, runner, pages, scheduler and the facts about them.

What lives here: the order of construction and what depends on what. What does not: processes, gRPC, Ray.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.plan import ReplicaLayout, layout_text
from kvtransfer.port import WorkerParts
from kvtransfer.session.guard import RoleContext
from pdserve.config.worker import WorkerConfig
from pdserve.engine.masks import TokenMasks
from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.errors import ConfigError, Incompatible
from pdserve.garbage import give_back_freed
from pdserve.kvcache.layout import INT8, pages_for
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.models.precision import EXACT
from pdserve.obs.tracing import spans_of
from pdserve.obs.work import Works
from pdserve.parallel.shards import shards
from pdserve.ranks.config import Launch
from pdserve.ranks.replica import Replica
from pdserve.sched.scheduler import SchedConfig, StepScheduler
from pdserve.structured.worker import WorkerGrammars
from pdserve.types import CapabilityRecord, ModelLimits, Role
from pdserve.worker.machine import machine_id
from pdserve.worker.precision import settled

Progress = Callable[[str], None]
LEAST_GAP_S = 5.0
"""A silence of our own shorter than this is a busy machine, however short the lease."""
TAIL_SHARE = 16
"""The last of a prompt's chunks for another worker is this part of a usual one; the one before it is longer.
A step more would read the weights once more (4 % of a usual chunk's time here)."""
GIL_SWITCH_S = 0.0001
"""How long one thread may keep the interpreter from another that waits for it (default 5 ms): a step begins
while the control thread still sends what led to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How the other ranks of a worker are started, and who hears of it when the replica is over."""

    launch: Launch
    on_lost: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A worker's engine, ready to run. limits: the model's, with a context that the pool can hold. replica:
    the other ranks, if there are any."""

    config: WorkerConfig
    model: LoadedModel
    limits: ModelLimits
    runner: ModelRunner
    parts: WorkerParts
    replica: Replica | None = None

    def capability(self) -> CapabilityRecord:
        """What this worker can exchange with others."""
        layout = self.parts.layout
        return CapabilityRecord(
            layout=layout.fingerprint(),
            numerics=self.runner.numerics_id,
            model=self.model.digest,
            tokenizer=self.model.tokenizer.digest,
            dtype=layout.dtype,
            page_size=layout.page_size,
            page_bytes=self.parts.page_bytes,
            transports=self.parts.transports,
            pages=self.parts.context.layout,
        )

    def close(self) -> None:
        """Ends the other ranks and gives the pool back; when no step runs and nobody moves pages."""
        if self.replica is not None:
            self.replica.close()
        self.parts.grammars.close()
        self.parts.pool.close()


def build_engine(config: WorkerConfig, run_dir: str, progress: Progress, ranks: RankOptions) -> Engine:
    """Loads the model, makes the pool and warms up. Compute thread. Raises ModelError, ConfigError, or
    WorkerLost when another rank of the worker ends meanwhile."""
    sys.setswitchinterval(GIL_SWITCH_S)
    config = settled(config, progress)
    if config.tp == 1:
        return _build(config, run_dir, progress, None)
    replica = Replica.launch(config, run_dir, ranks.launch, ranks.on_lost)
    try:
        return _build(config, run_dir, progress, replica)
    except BaseException:
        replica.close()
        raise


def _build(config: WorkerConfig, run_dir: str, progress: Progress, replica: Replica | None) -> Engine:
    tls = config.tls_source()
    if tls is not None:
        tls.check_serves(config.host)
    # Ranks compute with exact weights: all of them, whatever their role, from the same form of a model.
    role = config.role if config.tp == 1 else Role.AGGREGATED
    model = load_model(config.model, config.dtype, keep_quantised=config.weights != EXACT, role=role)
    progress(f"building the model, {config.weights}")
    grammars = WorkerGrammars(model.tokenizer)
    if replica is None:
        runner, pool = _runner(config, model, grammars.masks)
    else:
        runner, pool = replica.start(model, secrets.randbits(64), grammars.masks)
    limits = _limits(model, runner.homes.pages_each * config.page_size)
    model = model.without_weights()  # the runner has packed copies of its own
    give_back_freed()
    progress("warming up")
    chunk = min(config.prefill_chunk_tokens, limits.max_context)
    runner.warmup(chunk_tokens=chunk, max_num_seqs=min(8, config.max_num_seqs))
    if replica is not None:
        replica.serve()
    pages = PageManager(pool.num_pages, pool.pool_id, runner.homes.num_homes)
    parts = WorkerParts(
        context=_context(config, model, runner, limits),
        pools=(pool,) if replica is None else replica.pools.by_rank,
        pages=pages,
        scheduler=StepScheduler(_sched_config(config, model, runner), pages),
        transports=config.transports,
        host=config.host,
        host_id=machine_id(),
        run_dir=run_dir,
        grammars=grammars,
        tls=tls,
        works=_works(config),
    )
    return Engine(config=config, model=model, limits=limits, runner=runner, parts=parts, replica=replica)


def _works(config: WorkerConfig) -> Works:
    """What is told of calls that are over. Raises ConfigError."""
    about = {"pdserve.worker.id": config.worker_id, "pdserve.worker.role": str(config.role)}
    spans = spans_of(config, f"pdserve-{config.role}", config.worker_id, **about)
    return Works(config.worker_id, spans)


def _runner(config: WorkerConfig, model: LoadedModel, masks: TokenMasks) -> tuple[ModelRunner, KVPool]:
    """The runner of a worker without other ranks, and its pool."""
    layout = page_layout(model.config, page_size=config.page_size, dtype=config.page_dtype)
    num_pages = config.num_pages or config.kv_memory_bytes // layout.stride_bytes
    if num_pages < 2:
        raise ConfigError("kv_memory: too small for two KV pages of this model; give more memory")
    pool = KVPool.create(layout, num_pages, secrets.randbits(64))
    pool.prefault()  # else the first use of each page pays for it, within somebody's TTFT
    weights = config.weights or EXACT
    return ModelRunner(model, pool, deterministic=config.deterministic, weights=weights, masks=masks), pool


def _limits(model: LoadedModel, pool_rows: int) -> ModelLimits:
    """The model's limits; a context longer than the pool could never be served."""
    known = model.limits
    return ModelLimits(
        vocab_size=known.vocab_size,
        max_context=min(known.max_context, pool_rows),
        end_token_ids=known.end_token_ids,
        bos_token_id=known.bos_token_id,
    )


def _context(
    config: WorkerConfig, model: LoadedModel, runner: ModelRunner, limits: ModelLimits
) -> RoleContext:
    # Reservations leave room for one prompt of any length where the worker may prefill (protocol.md §5).
    # Decode alone prefills what nobody else can: it sets less aside.
    share = {Role.PREFILL: 0.0, Role.DECODE: 0.25, Role.AGGREGATED: 0.5}[config.role]
    floor = min(pages_for(limits.max_context, config.page_size), int(runner.homes.pages_each * share))
    return RoleContext(
        worker_id=config.worker_id,
        incarnation=secrets.randbits(63) | 1,
        page_size=config.page_size,
        max_context=limits.max_context,
        model=model.digest,
        numerics=runner.numerics_id,
        secret=config.secret_bytes,
        lease_s=config.lease_s,
        local_prefill_threshold=config.local_prefill_threshold,
        floor_pages=floor,
        max_num_seqs=config.max_num_seqs,
        decode_pace_s=config.decode_pace_s,
        host_id=machine_id(),
        max_gap_s=max(config.lease_s, LEAST_GAP_S),
        num_ranks=1 if config.attention_rows else config.tp,  # its pages are whole, each on one rank
        layout=_layout(config, model),
        kv_mixing=config.mixing,
    )


def _layout(config: WorkerConfig, model: LoadedModel) -> str:
    """How our pages are cut over our ranks, as text; empty for pages that can only be taken as they are."""
    if config.attention_repeated or config.page_dtype == INT8:  # scales lie beside the elements
        return ""
    whole = page_layout(model.config, page_size=config.page_size, dtype=config.page_dtype)
    heads = [shard.kv_heads for shard in shards(model.config, 1 if config.attention_rows else config.tp)]
    try:
        return layout_text(ReplicaLayout.of(whole, heads))
    except (ValueError, Incompatible):
        return ""


def _sched_config(config: WorkerConfig, model: LoadedModel, runner: ModelRunner) -> SchedConfig:
    return SchedConfig(
        page_size=config.page_size,
        chunk_tokens=config.prefill_chunk_tokens,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        deterministic=config.deterministic,
        tail_tokens=config.prefill_chunk_tokens // TAIL_SHARE,
        floor_pages=0,
        prefix_caching=config.prefix_caching,
        end_token_ids=model.limits.end_token_ids,
        model=model.digest,
        numerics=runner.numerics_id,
    )
