"""A worker's own metrics: read over HTTP as Prometheus does, each moves by what is known to have happened."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.obs.catalogue import PROCESS, WORKER
from pdserve.obs.catalogue.kinds import Kind
from pdserve.types import HandoverMode, Role, SamplingParams
from tests.support.direct import Direct, generate

PAGE, CHUNK = 16, 64
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
LONG = tuple(100 + i * 104729 % 40000 for i in range(150))
NUM_PAGES = -(-len(LONG) // PAGE)
MAKE = 5


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    made = Direct.start(metrics_port=0)
    yield made
    made.stop()


def scrape(direct: Direct, role: Role) -> Series:
    """All samples of a worker by name and labels, its role left out."""
    with urllib.request.urlopen(f"http://{direct.records[role].metrics}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not sample.name.startswith("process_"):
                assert labels.pop("role") == role, sample
            found[sample.name.removeprefix("pdserve_worker_"), frozenset(labels.items())] = sample.value
    return found


class Change:
    """By how much samples of one worker rose."""

    def __init__(self, before: Series, after: Series) -> None:
        self._rose = {key: value - before[key] for key, value in after.items()}

    def of(self, name: str, **labels: str) -> float:
        """One sample's."""
        return self._rose[name, frozenset(labels.items())]

    def counters(self, name: str) -> dict[tuple[str, ...], float]:
        """Those series of a counter that moved, by their label values in order of the labels' names."""
        moved = {k[1]: v for k, v in self._rose.items() if k[0] == name and v}
        return {tuple(value for _, value in sorted(labels)): rise for labels, rise in moved.items()}


async def changes(direct: Direct, request: object) -> tuple[Change, Change]:
    """What a request changed on the prefill and on the decode worker."""
    roles = (Role.PREFILL, Role.DECODE)
    before = [await asyncio.to_thread(scrape, direct, role) for role in roles]
    await request  # type: ignore[misc]
    await direct.until_idle()
    after = [await asyncio.to_thread(scrape, direct, role) for role in roles]
    return Change(before[0], after[0]), Change(before[1], after[1])


async def test_every_declared_series_is_there_before_anything_happened(direct: Direct) -> None:
    found = scrape(direct, Role.DECODE)
    names = {name for name, _ in found}
    for metric in (*WORKER, *PROCESS):
        short = metric.name.removeprefix("pdserve_worker_")
        ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        assert all(f"{short}{end}" in names for end in ends), metric.name
        if metric.kind is not Kind.HISTOGRAM and metric in WORKER:
            rest = [label for label in metric.labels if label.name != "role"]
            num = 1
            for label in rest:
                num *= len(label.values)
            assert sum(name == short for name, _ in found) == num, metric.name
    assert found["ready", frozenset()] == 1
    assert found["page_bytes", frozenset()] == direct.records[Role.DECODE].capability.page_bytes


async def test_a_handover_moves_both_workers_by_what_it_did(direct: Direct) -> None:
    ask = direct.ask(LONG, sampling=SamplingParams(max_tokens=MAKE, ignore_eos=True))
    prefill, decode = await changes(direct, generate(ask))
    num_chunks = -(-len(LONG) // CHUNK)
    assert prefill.counters("prompt_tokens_total") == {("computed",): len(LONG)}
    assert prefill.of("generated_tokens_total") == 1
    assert prefill.of("prefill_queue_seconds_count") == prefill.of("prefill_compute_seconds_count") == 1
    assert prefill.of("step_seconds_count") == prefill.of("step_sequences_sum") >= num_chunks
    assert prefill.of("step_rows_sum") == len(LONG)
    assert 0 < prefill.of("prefill_compute_seconds_sum") <= prefill.of("step_seconds_sum")
    assert decode.counters("prompt_tokens_total") == {("transferred",): len(LONG)}
    assert decode.of("generated_tokens_total") == MAKE - 1 == decode.of("step_rows_sum")
    assert decode.counters("transfers_total") == {("complete", "shm"): 1}
    page_bytes = direct.records[Role.DECODE].capability.page_bytes
    assert decode.counters("transferred_bytes_total") == {("shm",): NUM_PAGES * page_bytes}
    assert decode.counters("events_total") == {("reads_good",): NUM_PAGES}
    assert decode.of("transfer_seconds_count", transport="shm") == 1
    assert 0 < decode.of("verify_seconds_sum") < decode.of("transfer_seconds_sum", transport="shm")
    assert decode.of("decode_queue_seconds_count") == 1
    assert decode.of("prefill_compute_seconds_count") == 0


async def test_what_the_caches_have_is_not_computed_and_not_moved(direct: Direct) -> None:
    tokens = tuple(reversed(LONG))
    sampling = SamplingParams(max_tokens=MAKE, ignore_eos=True)
    await generate(direct.ask(tokens, sampling=sampling))
    prefill, decode = await changes(direct, generate(direct.ask(tokens, sampling=sampling)))
    hits = len(tokens) // PAGE * PAGE
    assert prefill.counters("prompt_tokens_total") == {
        ("prefix_hit",): hits, ("computed",): len(tokens) - hits,
    }  # fmt: skip
    assert decode.counters("prompt_tokens_total") == {
        ("prefix_hit",): hits, ("transferred",): len(tokens) - hits,
    }  # fmt: skip


async def test_a_prompt_computed_by_decode_is_no_transfer(direct: Direct) -> None:
    ask = direct.ask(
        LONG[:40], mode=HandoverMode.LOCAL, use_prefix_cache=False,
        sampling=SamplingParams(max_tokens=MAKE, ignore_eos=True),
    )  # fmt: skip
    prefill, decode = await changes(direct, generate(ask))
    assert not prefill.counters("step_seconds_count")
    assert decode.counters("prompt_tokens_total") == {("computed",): 40}
    assert decode.of("generated_tokens_total") == MAKE
    assert decode.of("prefill_queue_seconds_count") == decode.of("prefill_compute_seconds_count") == 1
    assert decode.of("decode_queue_seconds_count") == 1
    assert not decode.counters("transfers_total")
