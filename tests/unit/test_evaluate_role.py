"""The evaluate role with a real scheduler and page manager: what steps made adds up, nothing is left."""

from __future__ import annotations

import pytest

from kvtransfer.effects import AnswerEvaluate, Effect, RunStep
from kvtransfer.measures import prompt_tokens
from kvtransfer.session.guard import RoleContext
from pdserve.errors import PdserveError
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Evaluate, Evaluated, EvaluateParams
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import EvaluatedRows, SeqKind, SeqSpec, SeqStep, Started, StepPlan, StepResult
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import Pooling, SamplingParams, TokenLogprob
from pdserve.worker.core import WorkerCore
from pdserve.worker.evaluate import EvaluateRole

SIZE, CHUNK, PAGES = 4, 8, 12
LOGPROBS = EvaluateParams(num_top=0)
MEAN = EvaluateParams(pooling=Pooling.MEAN)


class Worker:
    """A worker's core with this role alone. A row's log-probability is minus its number, its hidden state its
    number."""

    def __init__(self, token_budget: int = CHUNK) -> None:
        self.pages = PageManager(PAGES, 7)
        config = SchedConfig(page_size=SIZE, chunk_tokens=CHUNK, token_budget=token_budget, max_num_seqs=4)
        self.scheduler = StepScheduler(config, self.pages)
        context = RoleContext(
            worker_id="w", incarnation=5, page_size=SIZE, max_context=PAGES * SIZE, model="m", numerics="n",
            secret=b"x" * 16,
        )  # fmt: skip
        self.role = EvaluateRole(context, self.pages, self.scheduler)
        self.core = WorkerCore(self.pages, self.scheduler, [self.role])
        self.now = 0.0
        self.plan: StepPlan | None = None
        self.answers: dict[str, Evaluated | PdserveError] = {}

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RunStep):
                self.plan = effect.plan
            if isinstance(effect, AnswerEvaluate):
                self.answers[effect.call_id] = effect.result

    def ask(self, name: str, call: Evaluate) -> None:
        assert self.role.refusal(call) is None
        self.now += 1
        self.take(self.core.settle(self.role.evaluate(name, call, self.now), self.now))

    def cancel(self, name: str) -> None:
        self.take(self.core.settle(self.role.cancel(name), self.now))

    def step(self, **failed: str) -> None:
        """Carries the running step out."""
        plan, self.plan = self.plan, None
        assert plan is not None
        rows = {s.seq_id: made(s) for s in plan.seqs if s.evaluate is not None and s.seq_id not in failed}
        tokens = {s.seq_id: 1 for s in plan.seqs if s.sample}
        result = StepResult(step_id=plan.step_id, tokens=tokens, failed=failed or None, evaluated=rows)
        self.take(self.role.computed(rows))
        self.take(self.core.step_done(result, self.now))

    def run(self) -> None:
        while self.plan is not None:
            self.step()


def made(step: SeqStep) -> EvaluatedRows:
    assert step.evaluate is not None
    end = step.start + len(step.token_ids)
    numbers = range(end - step.evaluate.num_rows, end)
    if step.evaluate.num_top is None:
        return EvaluatedRows(hidden_sum=(float(sum(numbers)), 1.0))
    pairs = zip(numbers, step.evaluate.targets, strict=False)
    return EvaluatedRows(logprobs=tuple(TokenLogprob(token_id=t, logprob=-n) for n, t in pairs))


def call(length: int, params: EvaluateParams = LOGPROBS, first: int = 100, tenant: str = "t") -> Evaluate:
    ids = tuple(range(first, first + length))
    return Evaluate(receiver_incarnation=5, token_ids=ids, tenant=tenant, params=params)


def whole(ask: Evaluate) -> tuple[TokenLogprob, ...]:
    """Of all tokens from the first one asked for."""
    start = ask.params.from_index
    return tuple(
        TokenLogprob(token_id=token, logprob=-(start - 1 + i))
        for i, token in enumerate(ask.token_ids[start:])
    )


@pytest.mark.parametrize("length", [2, 8, 9, 16, 30])
def test_chunks_add_up(length: int) -> None:
    worker = Worker()
    worker.ask("E:0", call(length))
    worker.ask("E:1", call(length, MEAN, first=300))
    worker.run()
    assert worker.answers["E:0"] == Evaluated(logprobs=whole(call(length)))
    mean = worker.answers["E:1"]
    assert isinstance(mean, Evaluated)
    assert mean.vector[0] == sum(range(length)) / length
    assert worker.core.idle


def test_rows_before_those_asked_for_come_from_the_tenants_own_cache() -> None:
    worker = Worker()
    later = call(30, EvaluateParams(num_top=0, from_index=18))
    worker.ask("E:0", call(30))
    worker.run()
    worker.ask("E:1", later)
    worker.run()
    worker.ask("E:2", call(30, EvaluateParams(num_top=0, from_index=18), tenant="other"))
    worker.run()
    worker.ask("E:3", call(30))
    worker.run()
    assert worker.answers["E:1"] == Evaluated(logprobs=whole(later), cached_tokens=16)
    assert worker.answers["E:2"] == Evaluated(logprobs=whole(later), cached_tokens=0)
    assert worker.answers["E:3"] == Evaluated(logprobs=whole(call(30)), cached_tokens=0)
    assert worker.core.idle


def test_what_is_preempted_starts_again() -> None:
    """An older sequence that generates takes its pages before it is done."""
    worker = Worker(token_budget=2)
    older = SeqSpec(
        seq_id="older", kind=SeqKind.FULL, token_ids=tuple(range(15)), num_prompt=15, arrival=0.0,
        sampling=SamplingParams(max_tokens=20, ignore_eos=True),
    )  # fmt: skip
    worker.scheduler.submit(older)
    worker.ask("E:0", call(28))
    starts = []
    while worker.plan is not None:
        starts += [s.start for s in worker.plan.seqs if s.seq_id == "E:0"]
        worker.step()
        if not worker.scheduler.has("older"):
            worker.pages.drop_all(Holder(HolderKind.REQUEST, "older"))
            worker.take(worker.core.settle([], worker.now))
    assert starts.count(0) == 2
    assert worker.answers["E:0"] == Evaluated(logprobs=whole(call(28)))
    assert worker.core.idle


def test_what_the_cache_has_is_counted_once_though_it_starts_again() -> None:
    worker = Worker()
    worker.role.evaluate("E:0", call(30), 1.0)
    told = [worker.role.seq_event(Started(seq_id="E:0", hit_tokens=16), now) for now in (1.0, 2.0)]
    assert told == [prompt_tokens("prefix_hit", 16), []]


def test_a_cancel_leaves_nothing_waiting_or_running() -> None:
    worker = Worker()
    for name in ("E:0", "E:1"):
        worker.ask(name, call(30, first=100 if name == "E:0" else 300))
    worker.cancel("E:1")
    assert worker.role.num_live == 1
    worker.cancel("E:0")  # in the running step
    assert (worker.role.num_live, worker.role.num_active) == (1, 0)
    worker.step()
    assert worker.plan is None
    assert worker.answers == {}
    assert worker.core.idle


def test_a_failure_is_told_and_leaves_no_page() -> None:
    worker = Worker()
    worker.ask("E:0", call(9))
    worker.step(**{"E:0": "it broke"})
    error = worker.answers["E:0"]
    assert isinstance(error, PdserveError)
    assert (error.label, "it broke" in error.message) == ("internal", True)
    assert worker.core.idle


def test_refusals_are_typed() -> None:
    worker = Worker()
    stale = Evaluate(receiver_incarnation=6, token_ids=(1, 2), tenant="t", params=LOGPROBS)
    found = [worker.role.refusal(stale), worker.role.refusal(call(PAGES * SIZE + 1))]
    worker.core.drain()
    found.append(worker.role.refusal(call(2)))
    assert [error.label for error in found if error] == ["stale_incarnation", "prompt_too_long", "draining"]


def test_live_ones_go_on_while_draining() -> None:
    worker = Worker()
    worker.ask("E:0", call(20))
    worker.core.drain()
    assert not worker.core.drained
    worker.run()
    assert worker.answers["E:0"] == Evaluated(logprobs=whole(call(20)))
    assert worker.core.drained
