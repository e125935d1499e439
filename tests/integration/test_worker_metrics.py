"""A worker's own metrics: read over HTTP as Prometheus does, each moves by what is known to have happened."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config.worker import WorkerConfig
from pdserve.messages import Refused, Reserved
from pdserve.obs.catalogue import PROCESS, WORKER
from pdserve.obs.catalogue.kinds import Kind
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.types import HandoverMode, Role, SamplingParams, WorkerRecord
from pdserve.worker.host import WorkerHost
from tests.support import direct as dx
from tests.support import tiny_models
from tests.support.chaos import ChaosProxy, Step
from tests.support.direct import Ask, Direct, generate
from tests.support.tools import tool

PAGE, CHUNK, POOL = 16, 64, 60
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
LONG = tuple(100 + i * 104729 % 40000 for i in range(150))
NUM_PAGES = -(-len(LONG) // PAGE)
MAKE = 5
SHORT = LONG[:60]
"""One chunk: its pages are read in order, and one that comes again comes after the others."""
SHORT_PAGES = -(-len(SHORT) // PAGE)


class Bed(Direct):
    """The two workers with a proxy of the test's between their pools, so that pages can be damaged."""

    proxy: ChaosProxy

    def own(self, tokens: tuple[int, ...], **changes: Any) -> Ask:
        """A request whose pages come through the proxy."""
        settings = {"sampling": SamplingParams(max_tokens=MAKE, ignore_eos=True)} | changes
        return self.ask(tokens, prefill_as=replace(self.p, tcp=self.proxy.address), **settings)


@pytest.fixture(scope="module")
def direct() -> Iterator[Bed]:
    made = Bed.start(num_pages=POOL, metrics_port=0, transports=("tcp",), vllm_metrics=True)
    assert isinstance(made, Bed)
    made.proxy = ChaosProxy(made.p.tcp)
    yield made
    made.proxy.stop()
    made.stop()


def page(record: WorkerRecord) -> str:
    """What a worker's port answers."""
    with urllib.request.urlopen(f"http://{record.metrics}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def scrape(direct: Bed, role: Role) -> Series:
    """All samples of a worker by name and labels, its role left out."""
    return parsed(page(direct.records[role]), role)


def parsed(text: str, role: Role) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not sample.name.startswith(("process_", "vllm:")):
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


async def changes(direct: Bed, request: object) -> tuple[Change, Change]:
    """What a request changed on the prefill and on the decode worker."""
    roles = (Role.PREFILL, Role.DECODE)
    before = [await asyncio.to_thread(scrape, direct, role) for role in roles]
    await request  # type: ignore[misc]
    await direct.until_idle()
    after = [await asyncio.to_thread(scrape, direct, role) for role in roles]
    return Change(before[0], after[0]), Change(before[1], after[1])


async def test_every_declared_series_is_there_before_anything_happened(direct: Bed) -> None:
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


async def test_a_handover_moves_both_workers_by_what_it_did(direct: Bed) -> None:
    prefill, decode = await changes(direct, generate(direct.own(LONG)))
    num_chunks = -(-len(LONG) // CHUNK)
    assert prefill.counters("prompt_tokens_total") == {("computed",): len(LONG)}
    assert prefill.of("generated_tokens_total") == 1
    assert prefill.of("prefill_queue_seconds_count") == prefill.of("prefill_compute_seconds_count") == 1
    assert prefill.of("step_seconds_count") == prefill.of("step_sequences_sum") >= num_chunks
    assert prefill.of("step_rows_sum") == len(LONG)
    assert 0 < prefill.of("prefill_compute_seconds_sum") <= prefill.of("step_seconds_sum")
    assert decode.counters("prompt_tokens_total") == {("transferred",): len(LONG)}
    assert decode.of("generated_tokens_total") == MAKE - 1 == decode.of("step_rows_sum")
    assert decode.counters("transfers_total") == {("complete", "tcp"): 1}
    page_bytes = direct.records[Role.DECODE].capability.page_bytes
    assert decode.counters("transferred_bytes_total") == {("tcp",): NUM_PAGES * page_bytes}
    assert decode.counters("events_total") == {("reads_good",): NUM_PAGES}
    assert decode.of("transfer_seconds_count", transport="tcp") == 1
    assert 0 < decode.of("verify_seconds_sum") < decode.of("transfer_seconds_sum", transport="tcp")
    assert decode.of("decode_queue_seconds_count") == 1
    assert decode.of("prefill_compute_seconds_count") == 0


async def test_what_the_caches_have_is_not_computed_and_not_moved(direct: Bed) -> None:
    tokens = tuple(reversed(LONG))
    await generate(direct.own(tokens))
    prefill, decode = await changes(direct, generate(direct.own(tokens)))
    hits = len(tokens) // PAGE * PAGE
    assert prefill.counters("prompt_tokens_total") == {
        ("prefix_hit",): hits, ("computed",): len(tokens) - hits,
    }  # fmt: skip
    assert decode.counters("prompt_tokens_total") == {
        ("prefix_hit",): hits, ("transferred",): len(tokens) - hits,
    }  # fmt: skip


async def test_a_prompt_computed_by_decode_is_no_transfer(direct: Bed) -> None:
    ask = direct.own(LONG[:40], mode=HandoverMode.LOCAL, use_prefix_cache=False)
    prefill, decode = await changes(direct, generate(ask))
    assert not prefill.counters("step_seconds_count")
    assert decode.counters("prompt_tokens_total") == {("computed",): 40}
    assert decode.of("generated_tokens_total") == MAKE
    assert decode.of("prefill_queue_seconds_count") == decode.of("prefill_compute_seconds_count") == 1
    assert decode.of("decode_queue_seconds_count") == 1
    assert not decode.counters("transfers_total")


@pytest.fixture(autouse=True)
def _intact(direct: Bed) -> Iterator[None]:
    yield
    direct.proxy.reset()


def damaged(direct: Bed, times: int) -> None:
    """The third page arrives changed so many times."""
    left = [times]

    def step(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
        if left[0] and (number == 2 or number >= SHORT_PAGES):
            left[0] -= 1
            payload[len(payload) // 3] ^= 0x40
        return [header, bytes(payload)]

    direct.proxy.page = step


async def test_a_damaged_page_is_counted_and_moved_again(direct: Bed) -> None:
    damaged(direct, 1)
    _, decode = await changes(direct, generate(direct.own(SHORT, use_prefix_cache=False)))
    assert decode.of("digest_failures_total") == decode.of("resent_pages_total") == 1
    assert decode.counters("events_total") == {("reads_good",): SHORT_PAGES, ("reads_mismatch",): 1}
    assert decode.counters("transfers_total") == {("complete", "tcp"): 1}


async def test_a_transfer_that_fails_leaves_its_good_pages(direct: Bed) -> None:
    damaged(direct, 99)
    _, decode = await changes(direct, generate(direct.own(SHORT, use_prefix_cache=False)))
    assert decode.of("digest_failures_total") == 3
    assert decode.of("resent_pages_total") == 2
    assert decode.counters("transfers_total") == {("failed", "tcp"): 1}
    assert decode.counters("prompt_tokens_total") == {
        ("transferred",): 2 * PAGE, ("computed",): len(SHORT) - 2 * PAGE,
    }  # fmt: skip
    assert decode.of("transfer_seconds_count", transport="tcp") == 0


async def test_what_waits_for_its_other_half_is_seen_and_then_cancelled(direct: Bed) -> None:
    before = await asyncio.to_thread(scrape, direct, Role.DECODE)
    call = dx.reserve(direct.own(LONG, use_prefix_cache=False))
    assert isinstance(await call.next(), Reserved)
    during = Change(before, await asyncio.to_thread(scrape, direct, Role.DECODE))
    assert during.of("leases") == 1
    assert during.of("credits") == NUM_PAGES
    held = during.of("pages", state="reserved")
    assert held >= NUM_PAGES
    used = [during.of("used_pages", state="granted", age=age) for age in ("<1s", "<10s")]
    assert sum(used) == held == round(during.of("kv_utilization_ratio") * POOL)
    await call.close()
    await direct.until_idle()
    over = Change(before, await asyncio.to_thread(scrape, direct, Role.DECODE))
    assert over.counters("transfers_total") == {("cancelled", "none"): 1}
    assert over.of("leases") == over.of("credits") == over.of("pages", state="reserved") == 0


async def test_what_is_refused_and_what_is_fenced_off(direct: Bed) -> None:
    async def refused() -> None:
        message = replace(direct.own(LONG).reserve_message(), ticket=b"forged" * 20)
        call = dx.Reserving(direct, message)
        assert isinstance(await call.next(), Refused)
        await call.close()
        channel = open_channel(direct.p.control)
        stub = authenticated(prefill_pb2_grpc.PrefillServiceStub(channel), direct.secret)
        key = convert.key_to_pb(message.key)
        with pytest.raises(grpc.aio.AioRpcError, match="restarted"):
            await stub.CancelPrefill(prefill_pb2.CancelPrefillRequest(key=key, receiver_incarnation=1))
        await channel.close(None)

    prefill, decode = await changes(direct, refused())
    assert decode.counters("refusals_total") == {("bad_ticket",): 1}
    assert prefill.of("fenced_messages_total") == 1
    assert not prefill.counters("refusals_total")


async def test_pages_that_the_cache_gives_up_are_counted(direct: Bed) -> None:
    async def many() -> None:
        for first in range(6):
            await generate(direct.own((30_000 + first, *LONG[1:])))

    prefill, _ = await changes(direct, many())
    cached = 6 * (len(LONG) // PAGE)
    assert prefill.of("evictions_total") == cached - prefill.of("pages", state="evictable") > 0


def test_vllms_names_tell_the_same_numbers(direct: Bed) -> None:
    text = page(direct.records[Role.DECODE])
    ours, theirs = parsed(text, Role.DECODE), {}
    for (name, labels), value in ours.items():
        if name.startswith("vllm:"):
            theirs[name] = (dict(labels), value)
    made, value = theirs["vllm:generation_tokens_total"]
    assert value == ours["generated_tokens_total", frozenset()] > 0
    assert made == {"model_name": dx.MODEL, "engine": "0"}
    assert theirs["vllm:num_requests_waiting"][1] == 0
    assert theirs["vllm:iteration_tokens_total_sum"][1] == ours["step_rows_sum", frozenset()]
    assert theirs["vllm:kv_cache_usage_perc"][1] == ours["kv_utilization_ratio", frozenset()]
    assert theirs["vllm:cache_config_info"][0]["block_size"] == str(PAGE)
    assert theirs["vllm:cache_config_info"][0]["num_gpu_blocks"] == str(POOL)
    assert theirs["vllm:lora_requests_info"][0]["running_lora_adapters"] == ""


def test_promtool_finds_nothing_wrong(direct: Bed) -> None:
    text = page(direct.records[Role.PREFILL])
    ours = "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=ours, capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""


def test_several_ranks_have_one_port(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.llama(), tmp_path / "model")
    config = WorkerConfig(
        worker_id="a", role=Role.AGGREGATED, model=str(model), fleet_secret="ab" * 32, dtype="float32", tp=2,
        num_pages=16, prefill_chunk_tokens=16, token_budget=16, metrics_port=0,
    )  # fmt: skip
    host = WorkerHost(config)
    try:
        record = host.start()
        found = parsed(page(record), Role.AGGREGATED)
    finally:
        host.stop()
    assert found["pages", frozenset({("state", "free")})] == 16
    assert found["page_bytes", frozenset()] == record.capability.page_bytes


def test_a_drain_is_seen(direct: Bed) -> None:
    assert direct.prefill.drain(5.0)
    found = scrape(direct, Role.PREFILL)
    assert (found["draining", frozenset()], found["ready", frozenset()]) == (1, 0)
