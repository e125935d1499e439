"""A worker's sums: what they come to, that a bad label ends nothing, and what a step pays for them."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.effects import Count
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.obs.catalogue import worker as metrics
from pdserve.obs.catalogue.kinds import OTHER, Kind
from pdserve.obs.tally import Sums, Tally, families
from pdserve.sched.plan import Preempted, SeqStep, StepPlan, StepResult
from pdserve.types import Role, SamplingParams, WorkerLoad
from pdserve.worker.driver import Driver
from pdserve.worker.metrics import DERIVED, OWN, Figures, WorkerMetrics, WorkerSums
from tests.support.source_tree import ROOT
from tests.unit.role_kit import Decode, Prefill, key, prefill_call, reserve_call

COUNTED = re.compile(r'Count\(name="(\w+)"|\.count\("(\w+)"')
MOST_CALLS = 12
"""Functions that measuring a step may call; each addition takes a fraction of a microsecond."""


def values(sums: list[Sums]) -> dict[str, Any]:
    return {one.metric.name: dict(one.values) or dict(one.series) for one in sums}


def test_events_become_the_metrics_that_are_theirs() -> None:
    sums = WorkerSums()
    sums.count("retractions", 2)
    sums.count("foreign_envelopes", 3)
    sums.count("reads_mismatch")
    sums.count("reads_good", 5)
    sums.count("steps", 7)
    sums.count("a name nobody declared")
    sums.add(metrics.FENCED_MESSAGES)
    found = values(sums.copy())
    assert found[metrics.PREEMPTIONS.name] == {(): 2}
    assert found[metrics.FENCED_MESSAGES.name] == {(): 4}
    assert found[metrics.DIGEST_FAILURES.name] == {(): 1}
    events = {labels[0]: value for labels, value in found[metrics.EVENTS_TOTAL.name].items() if value}
    assert events == {"foreign_envelopes": 3, "reads_mismatch": 1, "reads_good": 5, OTHER: 1}
    assert OWN.isdisjoint(metrics.EVENTS)
    assert set(DERIVED) - OWN <= set(metrics.EVENTS)


def test_a_histogram_counts_by_bucket_and_writes_them_cumulated() -> None:
    tally = Tally(metrics.STEP_ROWS, ["role"])
    for rows in (1, 2, 2, 3, 10_000):
        tally.add(rows)
    (family,) = families([tally.copy()], {"role": "decode"})
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (buckets["1.0"], buckets["2.0"], buckets["4.0"], buckets["8192.0"], buckets["+Inf"]) == (
        1,
        3,
        4,
        4,
        5,
    )
    rest = {s.name.rpartition("_")[2]: s.value for s in family.samples if not s.name.endswith("_bucket")}
    assert rest == {"sum": 10_008, "count": 5}
    assert all(s.labels["role"] == "decode" for s in family.samples)


def test_a_label_outside_its_set_makes_no_series_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(metrics.REFUSALS, ["role"])
    with caplog.at_level(logging.ERROR):
        tally.add(1, ("drop table",))
        tally.add(1, ("full", "more"))
    copied = tally.copy()
    assert sum(copied.values.values()) == 0
    assert len(copied.values) == len(metrics.REFUSALS.labels[1].values)
    assert len(caplog.records) == 2


def test_every_sum_starts_with_all_its_series() -> None:
    for one in WorkerSums().copy():
        wanted = 1
        for label in one.metric.labels[1:]:
            wanted *= len(label.values)
        assert len(one.series if one.metric.kind is Kind.HISTOGRAM else one.values) == wanted


def test_pages_that_the_prefix_cache_gives_up_are_counted() -> None:
    pages = PageManager(4, 7)
    me = Holder(HolderKind.REQUEST, "r")
    held = pages.reserve(3, me)
    assert held is not None
    for index, page in enumerate(held):
        pages.fill(page)
        pages.seal(page, 4)
        assert pages.publish(page, bytes([index]), bytes([index - 1]) if index else None)
    pages.drop_all(me)
    assert pages.reserve(2, me) is not None
    assert pages.num_evicted == 1


def test_both_roles_say_when_a_sequence_lost_its_pages() -> None:
    decode, prefill = Decode(), Prefill()
    decode.role.reserve(reserve_call(key(), prefill=None), 0.0)
    assert Count(name="retractions") in decode.role.seq_event(Preempted(seq_id=f"D:{key()}"), 1.0)
    prefill.role.prefill(prefill_call(key()), 0.0)
    assert Count(name="retractions") in prefill.role.seq_event(Preempted(seq_id=f"P:{key()}"), 1.0)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def ready(told: WorkerMetrics) -> float:
    return next(f.samples[0].value for f in told.collect() if f.name == metrics.READY.name)


def test_a_control_thread_that_does_not_answer_is_told_as_not_ready(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.worker.metrics.ANSWER_S", 0.05)
    figures = Figures(load=WorkerLoad(num_pages=8, free_pages=8), page_bytes=1)
    told = WorkerMetrics(Role.DECODE, lambda: (figures, WorkerSums().copy()), loop)
    monkeypatch.setattr("pdserve.worker.metrics.ANSWER_S", 30.0)
    assert ready(told) == 1
    stuck, go_on = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (stuck.set(), go_on.wait()))
    assert stuck.wait(30)
    monkeypatch.setattr("pdserve.worker.metrics.ANSWER_S", 0.05)
    assert ready(told) == 0
    go_on.set()
    monkeypatch.setattr("pdserve.worker.metrics.ANSWER_S", 30.0)
    assert ready(told) == 1


def measured(sums: WorkerSums, num_sequences: int) -> int:
    """Measures a decode step of so many sequences; how many functions that called."""
    steps = tuple(
        SeqStep(
            seq_id=f"D:{number}", token_ids=(1,), start=5, pages=(1,), sample=True, sample_counter=3,
            sampling=SamplingParams(), history=None, evaluate=None,
        )
        for number in range(num_sequences)
    )  # fmt: skip
    plan = StepPlan(step_id=1, seqs=steps, zero_pages=(), copies=())
    tokens = {one.seq_id: 1 for one in steps}
    result = StepResult(step_id=1, tokens=tokens, began_s=1.0, ended_s=1.02)
    driver: Any = SimpleNamespace(sums=sums)
    calls: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        Driver._measure_step(driver, plan, result)
    finally:
        sys.setprofile(before)
    return len(calls)


def test_measuring_a_step_calls_little_however_many_sequences_it_has() -> None:
    sums = WorkerSums()
    alone, many = measured(sums, 1), measured(sums, 64)
    assert alone == many <= MOST_CALLS
    found = values(sums.copy())
    assert found[metrics.GENERATED_TOKENS.name] == {(): 65}
    assert found[metrics.STEP.name][()][1] == pytest.approx(2 * 0.02)


def test_every_event_that_the_code_counts_is_declared() -> None:
    found: set[tuple[str, str]] = set()
    for package in ("kvtransfer", "decode_worker", "prefill_worker", "pdserve/worker"):
        for path in (ROOT / package).rglob("*.py"):
            found.update(re.findall(COUNTED, path.read_text()))
    names = {name for pair in found for name in pair if name}
    assert {"retractions", "over_credit", "foreign_envelopes", "steps"} <= names
    assert names <= OWN | set(metrics.EVENTS)
    assert {f"reads_{status}" for status in ReadStatus} <= set(metrics.EVENTS)
