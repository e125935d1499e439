"""Carries out step plans on the compute thread: pages zeroed and copied, rows computed, tokens sampled.

What lives here: `ModelRunner`. What does not: deciding what runs (`pdserve.sched`), the model itself
(`pdserve.models`), page states (`pdserve.kvcache`). Only the compute thread calls `execute`.

A sequence whose own share goes wrong is reported in `StepResult.failed`; the step's others are good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from pdserve.engine.batch import build_batch, fault
from pdserve.engine.evaluate import Evaluations
from pdserve.engine.masks import TokenMasks
from pdserve.engine.numerics import numerics_id
from pdserve.engine.own_rows import OwnRows, everywhere
from pdserve.engine.picking import Picked, TokenPicker
from pdserve.engine.threads import apply_thread_count
from pdserve.engine.warmup import warmup_plans
from pdserve.errors import ConfigError
from pdserve.kernels.best import best_tokens
from pdserve.kernels.kv_view import KVView, inner_layout
from pdserve.kernels.stack import PhaseSeconds
from pdserve.kvcache.homes import Homes
from pdserve.kvcache.layout import INT8, PageLayout
from pdserve.kvcache.pool import KVPool
from pdserve.layers.moe import ExpertLoad
from pdserve.models.build import build_decoder
from pdserve.models.config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.fused import FusedDecoder, fused
from pdserve.models.loaded import LoadedModel
from pdserve.models.precision import EXACT, packer
from pdserve.models.sharded import build_repeated, build_shard, shard_config
from pdserve.models.sharded_rows import OwnRowsDecoder, build_own_rows
from pdserve.parallel.group import Group
from pdserve.parallel.placement_table import Placement
from pdserve.parallel.shards import shards
from pdserve.sched.plan import SeqStep, StepPlan, StepResult

Progress = Callable[[int, int], None]
_log = logging.getLogger(__name__)
_NOT_NUMBERS = "the model produced values that are not numbers for it"
_BROKE = "its computation failed"


def page_layout(config: ModelConfig, *, page_size: int, dtype: str) -> PageLayout:
    """The layout of the pages that a model's runner works on. page_size: rows. dtype: the model's, or "int8".
    Raises ConfigError for pages that no kernel has."""
    if dtype == INT8 and config.latent is not None:
        raise ConfigError(
            "kv_dtype: pages of latent rows (MLA) are of the model's type and small as they are; use auto"
        )
    return PageLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        inner=inner_layout(dtype, latent=config.latent is not None),
    )


def rank_config(config: ModelConfig, group: Group | None, whole: bool = False) -> ModelConfig:
    """The model that this process computes: its rank's part, or all of attention. Raises ConfigError."""
    return config if group is None or whole else shard_config(config, shards(config, group.size)[group.rank])


def _built(
    model: LoadedModel,
    deterministic: bool,
    group: Group | None,
    placement: Placement | None,
    attention: str,
    weights: str,
) -> Decoder:
    pack = packer(weights, model.quantised, deterministic=deterministic)
    if group is None:
        return build_decoder(model.config, model.weights, deterministic=deterministic, pack=pack)
    if weights != EXACT:
        raise ConfigError("weights: several ranks compute with exact weights only; use exact, or one rank")
    build = _BUILDS[attention]
    return build(model.config, model.weights, deterministic=deterministic, group=group, placement=placement)


_BUILDS = {"divided": build_shard, "repeated": build_repeated, "rows": build_own_rows}


def _kv_view(pool: KVPool, latent: bool) -> KVView:
    layout = pool.layout
    return KVView(
        storage=pool.storage,
        page_stride=pool.page_stride,
        num_pages=pool.num_pages,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype,
        latent=latent,
    )


class ModelRunner:
    """A built model over a page pool.

    numerics_id: equal for two runners whose pages are bit-identical for equal tokens. last_logits: with
    capture_logits, the sampled rows [V] float32 of the last step by sequence.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        *,
        device: str = "cpu",
        deterministic: bool = False,
        capture_logits: bool = False,
        group: Group | None = None,
        placement: Placement | None = None,
        attention: str = "divided",
        threads: int | None = None,
        weights: str = EXACT,
        masks: TokenMasks | None = None,
    ) -> None:
        """Builds the model. Raises ConfigError where the pool does not fit it, or for another device.

        group: the ranks that compute it together, each with its runner and pool; None: this process alone.
        All are given the same plans, in order; rank 0 samples, and nothing that breaks is tried again.
        placement: of experts over the group; None: in order.
        attention: divided by heads; "repeated": the ranks divide experts alone; "rows": each rank computes
        the sequences whose pages lie in its part of the pool, which all ranks map. threads: None for the
        process's default. weights: the scheme of linears (`models.precision`). masks: of grammars; None: a
        sequence with a grammar fails.
        """
        if device != "cpu":
            raise ConfigError(f"device {device!r} is not supported; use cpu")
        whole = group is None or attention != "divided"
        own = rank_config(model.config, group, whole)
        pages = pool.layout.dtype
        wanted = page_layout(own, page_size=pool.layout.page_size, dtype=pages)
        if pool.layout != wanted or pages not in (model.dtype, INT8):
            raise ConfigError("the page pool was made for another model, dtype or kernel")
        if group is not None and pages == INT8:
            raise ConfigError("kv_dtype: several ranks have pages of the model's type; use auto, or one rank")
        apply_thread_count(threads)
        self.config = model.config
        ranks, exchange = (1, "") if group is None or whole else (group.size, group.kind)
        self.numerics_id = numerics_id(
            dtype=model.dtype,
            pages=pages,
            deterministic=deterministic,
            ranks=ranks,
            exchange=exchange,
            weights=f"{weights} of {model.form}" if model.form else weights,
        )
        self.last_logits: dict[str, torch.Tensor] = {}
        self._pool = pool
        self._kv = _kv_view(pool, own.latent is not None)
        self._decoder = _built(model, deterministic, group, placement, attention, weights)
        self._model = fused(self._decoder) if group is None else self._decoder
        self._group = group
        self._own: OwnRows | None = None
        if isinstance(self._decoder, OwnRowsDecoder) and group is not None:
            self._own = OwnRows(Homes.over(pool.num_pages, group.size), group)
        self._capture = capture_logits
        self._picker = TokenPicker(model.limits.end_token_ids, masks)
        self._evaluations = Evaluations()

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self._kv.page_size

    @property
    def decoder(self) -> Decoder:
        """What is computed with; the compute thread's."""
        return self._decoder

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Tokens by layer and expert since start or its `reset`; None for a model without experts."""
        return self._decoder.expert_load

    @property
    def phase_seconds(self) -> PhaseSeconds | None:
        """Where steps' time goes, for models whose layers are one call."""
        return self._model.stack.seconds if isinstance(self._model, FusedDecoder) else None

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._kv.num_pages

    @property
    def homes(self) -> Homes:
        """Parts of the pool: a sequence's pages lie in one."""
        return Homes.over(self.num_pages) if self._own is None else self._own.homes

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries the plan out. Raises nothing for what one sequence did; see `StepResult.failed`."""
        began = time.perf_counter()
        self.last_logits = {}
        self._evaluations = Evaluations()
        pages = plan if self._own is None else self._own.part(plan)
        for page in pages.zero_pages:
            self._pool.zero(page)
        for source, target in pages.copies:
            self._pool.copy_page(source, target)
        faults = {s.seq_id: self._fault(s) for s in plan.seqs}
        failed = {seq_id: why for seq_id, why in faults.items() if why is not None}
        picked = self._run([s for s in plan.seqs if s.seq_id not in failed], failed)
        failed |= dict.fromkeys(self._evaluations.not_numbers, _NOT_NUMBERS)
        return StepResult(
            step_id=plan.step_id,
            tokens=picked.tokens,
            elapsed_s=time.perf_counter() - began,
            failed=failed or None,
            refused=frozenset(picked.failed),
            logprobs=picked.logprobs,
            evaluated=self._evaluations.rows,
        )

    def warmup(
        self, *, chunk_tokens: int = 512, max_num_seqs: int = 32, progress: Progress | None = None
    ) -> None:
        """Runs the shapes of serving once. Call before any sequence has pages: it writes to the first ones.

        chunk_tokens: rows of a prefill chunk. progress: called with (steps done, steps in all).
        """
        homes, size = self.homes, self.page_size
        plans = [
            everywhere(plan, homes)
            for plan in warmup_plans(
                num_pages=homes.pages_each,
                page_size=size,
                chunk=min(chunk_tokens, homes.pages_each * size, self.config.max_context),
                max_num_seqs=max_num_seqs,
            )
        ]
        for done, plan in enumerate(plans, 1):
            self.execute(plan)
            if progress is not None:
                progress(done, len(plans))
        self.last_logits = {}
        if self.expert_load is not None:
            self.expert_load.reset()

    def _fault(self, seq: SeqStep) -> str | None:
        found = fault(
            seq,
            vocab_size=self.config.vocab_size,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_context=self.config.max_context,
        )
        return self._own.fault(seq) if found is None and self._own is not None else found

    def _run(self, seqs: Sequence[SeqStep], failed: dict[str, str]) -> Picked:
        """Computes all sequences at once; if that breaks, one by one, so that only the broken one fails."""
        if not seqs:
            return Picked()
        try:
            return self._forward(seqs, failed)
        except Exception:
            if self._group is not None:
                raise  # the other ranks are where this one is not: only all of them together can start again
            _log.exception("a step failed")
            if len(seqs) == 1:
                failed[seqs[0].seq_id] = _BROKE
                return Picked()
        picked = Picked()
        for seq in seqs:  # rows are written again with the same values
            picked.add(self._run([seq], failed))
        return picked

    def _forward(self, seqs: Sequence[SeqStep], failed: dict[str, str]) -> Picked:
        with torch.inference_mode():
            sampled, logits_RV = self._compute(seqs)
            if self._group is not None and self._group.rank:
                return Picked()
            best_R = best_tokens(logits_RV)
        rows = [i for i, best in enumerate(best_R) if best >= 0]
        failed |= {s.seq_id: _NOT_NUMBERS for s, best in zip(sampled, best_R, strict=True) if best < 0}
        if len(rows) < len(best_R):
            logits_RV = logits_RV[rows]
        return self._sample([sampled[i] for i in rows], logits_RV, [best_R[i] for i in rows], failed)

    def _compute(self, seqs: Sequence[SeqStep]) -> tuple[tuple[SeqStep, ...], torch.Tensor]:
        """The sampled sequences and their logits [R, V], in one order."""
        if any(seq.evaluate is not None for seq in seqs):
            return self._evaluate(seqs)
        if self._own is not None:
            assert isinstance(self._decoder, OwnRowsDecoder)
            return self._own.compute(self._decoder, seqs, self._kv)
        batch = build_batch(seqs, self.page_size)
        return batch.sampled, self._model.forward(batch.token_ids_T, self._kv, batch.meta, batch.logit_rows_R)

    def _evaluate(self, seqs: Sequence[SeqStep]) -> tuple[tuple[SeqStep, ...], torch.Tensor]:
        """As `_compute`, with what is made of the rows of evaluated sequences kept for the result."""
        if self._own is not None:
            assert isinstance(self._decoder, OwnRowsDecoder)
            owners, x_AE = self._own.compute(self._decoder, seqs, self._kv, hidden=True)
            if self._group is not None and self._group.rank:
                return (), x_AE
            return self._evaluations.run(self._decoder, owners, x_AE)
        batch = build_batch(seqs, self.page_size)
        x_RE = self._decoder.hidden(batch.token_ids_T, self._kv, batch.meta, batch.logit_rows_R)
        return self._evaluations.run(self._decoder, batch.sampled, x_RE)

    def _sample(
        self, seqs: Sequence[SeqStep], logits_RV: torch.Tensor, best_R: list[int], failed: dict[str, str]
    ) -> Picked:
        if self._capture:
            self.last_logits |= {s.seq_id: row.clone() for s, row in zip(seqs, logits_RV, strict=True)}
        picked = self._picker.pick(seqs, logits_RV.numpy(), best_R)
        failed |= picked.failed
        return picked
