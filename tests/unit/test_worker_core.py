"""The worker's core as a whole: when its incarnation is over, and when it is drained."""

from __future__ import annotations

from kvtransfer.effects import Count, Effect, Retire
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import SeqEvent, SeqStep
from pdserve.sched.scheduler import StepScheduler
from pdserve.worker.core import LAST_WORDS_S, WorkerCore

GAP = 5.0
ME = Holder(HolderKind.REQUEST, "r")


class Idle:
    """A role with as many keys as the test says."""

    def __init__(self) -> None:
        self.draining = False
        self.num_live = self.num_active = 0
        self.pace_s = 0.0
        self.leases = (0, 0)
        self.put_off = False

    def rest(self) -> None:
        self.put_off = False

    def owns(self, seq_id: str) -> bool:
        return False

    def seq_event(self, event: SeqEvent, now: float) -> list[Effect]:
        return []

    def stepped(self, step: SeqStep, began: float, ended: float) -> None:
        raise AssertionError("no step runs here")

    def pool_shrunk(self, now: float) -> list[Effect]:
        return [Count(name="shrunk")]

    def tick(self, now: float) -> list[Effect]:
        return [Count(name="ticks")]

    def next_timer(self) -> float:
        return float("inf")


def make(num_pages: int = 40) -> tuple[WorkerCore, Idle, PageManager]:
    pages = PageManager(num_pages, 7)
    config = SchedConfig(page_size=4, chunk_tokens=4, token_budget=8, max_num_seqs=4)
    role = Idle()
    return WorkerCore(pages, StepScheduler(config, pages), [role], max_gap_s=GAP), role, pages


def test_the_core_ticks_often_enough_that_idleness_is_no_gap() -> None:
    core, _, _ = make()
    now = 100.0
    core.tick(now)
    for _ in range(20):
        due = core.next_timer()
        assert now < due <= now + GAP / 4
        now = due
        assert core.tick(now) == [Count(name="ticks")]


def test_after_a_gap_of_its_own_the_core_says_only_that_it_is_over() -> None:
    for first in ("tick", "input"):
        core, _, _ = make()
        core.tick(0.0)
        late = GAP + 0.01
        out = core.tick(late) if first == "tick" else core.settle([Count(name="answers")], late)
        (retire,) = out
        assert isinstance(retire, Retire)
        assert core.settle([Count(name="answers")], late) == []
        assert core.tick(late + 1) == []
        assert core.next_timer() == float("inf")


def test_a_gap_just_within_the_limit_changes_nothing() -> None:
    core, _, _ = make()
    core.tick(0.0)
    assert core.tick(GAP) == [Count(name="ticks")]


def quarantine(pages: PageManager, count: int) -> None:
    for page in pages.reserve(count, ME) or ():
        pages.quarantine(page)


def test_over_its_quarantine_budget_the_worker_drains_and_then_ends() -> None:
    core, role, pages = make()
    role.num_active = 1
    quarantine(pages, 2)
    core.tick(0.0)
    assert not core.draining, "within the budget of 5 %"
    quarantine(pages, 1)
    core.tick(1.0)
    assert core.draining
    assert role.draining
    assert core.over_quarantine
    core.tick(4.0)
    assert not core.retired, "the live key goes on"
    role.num_active = 0
    core.tick(5.0)
    assert core.next_timer() == 5.0 + LAST_WORDS_S
    assert [type(e) for e in core.tick(5.0 + LAST_WORDS_S)] == [Retire]


def test_drained_means_no_key_and_no_pin() -> None:
    core, role, pages = make()
    assert core.drained
    (page,) = pages.reserve(1, ME) or ()
    pin = Holder(HolderKind.IO, "send:1")
    pages.hold(page, pin)
    pages.drop(page, ME)
    assert not core.drained, "a peer may still be reading it"
    pages.drop(page, pin)
    assert core.drained
    role.num_live = 1
    assert not core.drained
