"""What a router tells Prometheus of its fleet: gauges of workers, pages and outstanding work.

Everything runs at a scrape, on its thread: single values and immutable records are read, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pdserve.insight import worker_state
from pdserve.obs.catalogue import router as names
from pdserve.obs.catalogue.kinds import AGES, PAGE_STATES
from pdserve.obs.metrics import Readings, kv_utilization, pages_by_state
from pdserve.obs.vllm import VllmFacts
from pdserve.types import REBALANCE_OUTCOMES, Role, UsedState
from router.dispatch import Dispatcher
from router.membership import Member
from router.roster import Roster


class FleetGauges:
    """Reads one router's roster and queue."""

    def __init__(self, roster: Roster, dispatcher: Dispatcher, *, insecure: bool) -> None:
        self._roster, self._dispatcher, self._insecure = roster, dispatcher, insecure

    def read(self, into: Readings) -> None:
        """Sets the gauges of workers, and what is outstanding."""
        into.set(names.INSECURE, self._insecure)
        into.set(names.BUILD_INFO, 1)
        outstanding = self._dispatcher.num_queued_tokens + self._dispatcher.inflight.uncached_tokens
        into.set(names.OUTSTANDING_PREFILL_TOKENS, outstanding)
        members = self._roster.members()
        for role in Role:
            of_role = [member for member in members if member.record.role is role]
            self._workers(into, role, of_role)
            _pages(into, role, of_role)
            _used_pages(into, role, of_role)
            _experts(into, role, of_role)

    def _workers(self, into: Readings, role: Role, members: Sequence[Member]) -> None:
        states = [self._state(member) for member in members]
        for state in names.WORKER_STATES:
            into.set(names.WORKERS, states.count(state), role=role, state=state)

    def _state(self, member: Member) -> str:
        """One of `WORKER_STATES`."""
        state = worker_state(member.load, suspect=self._roster.is_suspect(member))
        return state.replace(" ", "_")

    def vllm_facts(self) -> VllmFacts | None:
        """What vLLM's names need, of the fullest role; None before a worker and its model are known."""
        members, model = self._roster.members(), self._roster.model
        if model is None or not members:
            return None
        usage = (_mean_usage([m for m in members if m.record.role is role]) for role in Role)
        return VllmFacts(
            model=model.name,
            kv_usage=max(usage),
            page_size=min(member.record.page_size for member in members),
            num_pages=sum(member.record.pool_pages for member in members),
        )


def _mean_usage(members: Sequence[Member]) -> float:
    return fmean(kv_utilization(member.load) for member in members) if members else 0.0


def _pages(into: Readings, role: Role, members: Sequence[Member]) -> None:
    into.set(names.KV_UTILIZATION, _mean_usage(members), role=role)
    by_worker = [pages_by_state(member.load) for member in members]
    for state in PAGE_STATES:
        into.set(names.PAGES, sum(pages[state] for pages in by_worker), role=role, state=state)
    held = sum(_bytes(member, member.load.transfer_pages) for member in members)
    peak = sum(_bytes(member, member.load.peak_transfer_pages) for member in members)
    into.set(names.TRANSFER_BYTES, held, role=role)
    into.set(names.TRANSFER_PEAK_BYTES, peak, role=role)


def _used_pages(into: Readings, role: Role, members: Sequence[Member]) -> None:
    """Memory in use by what for and how long: what is stranded has a name here."""
    pages: dict[tuple[UsedState, str], int] = {(use, age): 0 for use in UsedState for age in AGES}
    size = dict.fromkeys(pages, 0)
    for member in members:
        for used in member.load.page_ages:
            for age, count in zip(AGES, used.counts, strict=True):
                pages[used.state, age] += count
                size[used.state, age] += _bytes(member, count)
    for (use, age), count in pages.items():
        into.set(names.USED_PAGES, count, role=role, state=use, age=age)
        into.set(names.USED_PAGE_BYTES, size[use, age], role=role, state=use, age=age)


def _experts(into: Readings, role: Role, members: Sequence[Member]) -> None:
    """Of the workers that are here now: what a worker counted is gone with its incarnation."""
    loads = [member.load for member in members]
    for outcome in REBALANCE_OUTCOMES:
        ended = sum(getattr(load, f"rebalances_{outcome}") for load in loads)
        into.set(names.REBALANCES, ended, role=role, outcome=outcome)
    into.set(names.EXPERT_COPIED_BYTES, sum(load.expert_copied_bytes for load in loads), role=role)
    into.set(names.LOST_RANKS, sum(load.lost_ranks for load in loads), role=role)
    worst = max((load.expert_imbalance for load in loads), default=0.0)
    into.set(names.EXPERT_IMBALANCE, worst, role=role)
    loss = max((load.expert_balance_loss for load in loads), default=0.0)
    into.set(names.EXPERT_BALANCE_LOSS, loss, role=role)


def _bytes(member: Member, pages: int) -> int:
    return pages * member.record.capability.page_bytes
