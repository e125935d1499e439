"""Drives the real step scheduler, page manager, pool and runner in one thread, for tests.

What lives here: submit prompts, step until all are done. What does not: any check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.pool import KVPool
from pdserve.messages import EvaluateParams
from pdserve.models.loaded import LoadedModel
from pdserve.sched.plan import (
    EvaluatedRows,
    SeqEvent,
    SeqFailed,
    SeqFinished,
    SeqKind,
    SeqSpec,
    Started,
    StepPlan,
    StepResult,
    TokenSampled,
)
from pdserve.sched.scheduler import SchedConfig, StepScheduler
from pdserve.types import SamplingParams, TokenLogprob


class EngineDriver:
    """One worker's engine without the worker. tokens, logprobs, logits, evaluated, failed: what came out, by
    sequence. hits: tokens from the cache, by sequence. plans, events: all of them."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_pages: int = 512,
        page_size: int = 16,
        chunk_tokens: int = 512,
        max_num_seqs: int = 32,
        deterministic: bool = True,
        capture_logits: bool = False,
        runner: ModelRunner | None = None,
    ) -> None:
        """runner: one that is there already, with its pool, in place of a new one."""
        if runner is None:
            layout = page_layout(model.config, page_size=page_size, dtype=model.dtype)
            self.pool = KVPool.create(layout, num_pages, pool_id=7)
            runner = ModelRunner(model, self.pool, deterministic=deterministic, capture_logits=capture_logits)
        self.runner = runner
        self.manager = PageManager(runner.num_pages, 7, runner.homes.num_homes)
        config = SchedConfig(
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            token_budget=max(2 * chunk_tokens, max_num_seqs),
            max_num_seqs=max_num_seqs,
            deterministic=deterministic,
            end_token_ids=model.limits.end_token_ids,
            model=model.digest,
            numerics=self.runner.numerics_id,
        )
        self.scheduler = StepScheduler(config, self.manager)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.failed: dict[str, str] = {}
        self.evaluated: dict[str, EvaluatedRows] = {}
        self.hits: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.events: list[SeqEvent] = []

    def submit(self, seq_id: str, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        spec = SeqSpec(
            seq_id=seq_id,
            kind=SeqKind.FULL,
            token_ids=tuple(token_ids),
            num_prompt=len(token_ids),
            sampling=sampling,
            arrival=float(len(self.tokens)),
        )
        self.tokens[seq_id] = []
        self.logits[seq_id] = []
        self.logprobs[seq_id] = []
        self.scheduler.submit(spec)

    def evaluate(self, seq_id: str, token_ids: Sequence[int], params: EvaluateParams) -> None:
        """A sequence that nothing is generated for; what is made of it is added up in `evaluated`."""
        spec = SeqSpec(
            seq_id=seq_id,
            kind=SeqKind.EVALUATE,
            token_ids=tuple(token_ids),
            num_prompt=len(token_ids),
            sampling=SamplingParams(),
            arrival=float(len(self.tokens)),
            evaluate=params,
        )
        self.evaluated[seq_id] = EvaluatedRows()
        self.scheduler.submit(spec)

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.plans.append(plan)
        new = self.scheduler.drain_events()
        self.hits |= {event.seq_id: event.hit_tokens for event in new if isinstance(event, Started)}
        self.events += new
        self._settle(self.runner.execute(plan))
        return True

    def _settle(self, result: StepResult) -> None:
        for seq_id, row in self.runner.last_logits.items():
            self.logits[seq_id].append(row)
        for seq_id, rows in result.evaluated.items():
            before = self.evaluated[seq_id]
            sums = zip(before.hidden_sum or (0.0,) * len(rows.hidden_sum), rows.hidden_sum, strict=True)
            self.evaluated[seq_id] = EvaluatedRows(
                logprobs=before.logprobs + rows.logprobs, hidden_sum=tuple(a + b for a, b in sums)
            )
        for event in self.scheduler.finish_step(result):
            match event:
                case TokenSampled(seq_id=seq_id, token_id=token, logprob=logprob):
                    self.tokens[seq_id].append(token)
                    self.logprobs[seq_id] += [] if logprob is None else [logprob]
                case SeqFailed(seq_id=seq_id, message=message):
                    self.failed[seq_id] = message
                    self._drop(seq_id)
                case SeqFinished(seq_id=seq_id):
                    self._drop(seq_id)

    def _drop(self, seq_id: str) -> None:
        self.manager.drop_all(Holder(HolderKind.REQUEST, seq_id))

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.step():
            pass
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0


def generate(
    driver: EngineDriver, prompts: Mapping[str, Sequence[int]], max_tokens: int
) -> dict[str, list[int]]:
    """Greedy tokens by sequence, end tokens not stopping, all sequences at the same time."""
    for seq_id, token_ids in prompts.items():
        driver.submit(seq_id, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    driver.run()
    assert not driver.failed
    return driver.tokens
