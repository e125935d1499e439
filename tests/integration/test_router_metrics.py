"""What a router tells Prometheus: each metric moves by the known amount, under our names and vLLM's.

Real sockets, scripted workers. Not here: the catalogue itself (unit/test_metrics).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError, Overloaded
from pdserve.messages import PrefillRequest, Reserve, Reserved
from pdserve.obs import catalogue
from pdserve.obs.catalogue import Kind
from pdserve.rpc import convert
from pdserve.types import Role, WorkerLoad
from router.config import RouterConfig
from router.main import Router
from tests.support.router_kit import FakeWorker, Fleet, fleet
from tests.support.tools import tool

PROMPT = "abcdef"


async def page(router: Router, path: str = "/metrics") -> str:
    url = f"http://127.0.0.1:{router.metrics_port}{path}"
    return await asyncio.to_thread(lambda: str(urllib.request.urlopen(url, timeout=5).read().decode()))


class Look:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


async def look(running: Fleet) -> Look:
    return Look(await page(running.router))


# ---- requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "roles"),
    [
        ("disaggregated", (Role.PREFILL, Role.DECODE)),
        ("local", (Role.DECODE,)),
        ("aggregated", (Role.AGGREGATED,)),
    ],
)
async def test_a_request_counts_by_who_computed_its_prompt(mode: str, roles: tuple[Role, ...]) -> None:
    workers = [FakeWorker(str(role), role) for role in roles]
    async with fleet(*workers, metrics=True, slo_ttft_s=60.0, slo_itl_s=0.0) as running:
        await running.client.generate(PROMPT, max_tokens=4).result()
        seen = await look(running)
    for each in ("disaggregated", "local", "aggregated"):
        ours = each == mode
        assert seen("pdserve_ttft_seconds_count", mode=each) == ours
        assert seen("pdserve_e2e_seconds_count", mode=each) == ours
        assert seen("pdserve_handovers_total", mode=each) == ours
        assert seen("pdserve_itl_seconds_count", mode=each) == 3 * ours
    moved = len(PROMPT) * (mode == "disaggregated")
    sources = {"computed": len(PROMPT), "transferred": moved, "hit_prefill": 0, "hit_decode": 0}
    for source, tokens in sources.items():
        assert seen("pdserve_prompt_tokens_total", source=source) == tokens
    assert seen("pdserve_slo_requests_total", objective="ttft", met="yes") == 1
    assert seen("pdserve_slo_requests_total", objective="ttft", met="no") == 0
    assert seen("pdserve_slo_requests_total", objective="itl", met="no") == 1
    assert seen("pdserve_slo_requests_total", objective="itl", met="yes") == 0
    assert seen("pdserve_request_prompt_tokens_sum") == len(PROMPT)
    assert seen("pdserve_request_completion_tokens_sum") == 4
    assert seen("pdserve_outstanding_prefill_tokens") == 0
    assert seen("pdserve_requests_total", outcome="length") == 1


async def test_prompts_are_outstanding_until_they_are_computed() -> None:
    prefill, decode = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)
    compute = asyncio.Event()

    async def later(call: PrefillRequest) -> convert.PrefillResult:
        await compute.wait()
        return await prefill.prefill(call)

    async def hits(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        async for event in decode.decode(call):
            yield Reserved(key=call.key, mode=call.mode, hit_tokens=2) if type(event) is Reserved else event

    prefill.prefill_script, decode.decode_script, decode.pause_at = later, hits, 0
    async with fleet(prefill, decode, metrics=True) as running:
        result = asyncio.ensure_future(running.client.generate(PROMPT, max_tokens=2).result())
        await decode.wait_for("paused")
        await prefill.wait_for("prefill")
        seen = await look(running)
        assert seen("pdserve_outstanding_prefill_tokens") == len(PROMPT) - 2, "decode has two of them"
        assert seen("pdserve_running_requests") == 1
        compute.set()
        decode.gate.set()
        await result
        assert (await look(running))("pdserve_outstanding_prefill_tokens") == 0


async def test_what_is_not_queued_is_counted_by_why() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode, metrics=True, max_queue=1, max_queue_wait_s=0.5) as running:
        await decode.beat(WorkerLoad(num_pages=8, free_pages=8, draining=True))
        first = asyncio.ensure_future(running.client.generate(PROMPT).result())
        await queued(running, 1)
        seen = await look(running)
        assert seen("pdserve_queued_requests") == 1
        assert seen("pdserve_outstanding_prefill_tokens") == len(PROMPT)
        with pytest.raises(Overloaded):
            await running.client.generate(PROMPT).result()
        second = asyncio.ensure_future(running.client.generate(PROMPT, priority=-1).result())
        for waited in (first, second):
            with pytest.raises(Overloaded):
                await waited
        seen = await look(running)
    reasons = {"queue_full": 1, "displaced": 1, "waited_too_long": 1, "deadline": 0, "tenant_share": 0}
    for reason, count in reasons.items():
        assert seen("pdserve_shed_requests_total", reason=reason) == count, reason
    assert seen("pdserve_requests_total", outcome="overloaded") == 3


async def queued(running: Fleet, count: int) -> None:
    """Returns once so many requests wait."""
    async with asyncio.timeout(10):
        while (await running.client.get_status()).queued != count:
            pass


# ---- workers -----------------------------------------------------------------------------------------


async def test_workers_count_by_state_and_their_pages_by_use() -> None:
    names = ("ready", "draining", "not_ready", "suspect")
    workers = {name: FakeWorker(name, Role.DECODE) for name in names}
    loads = {
        "ready": WorkerLoad(num_pages=10, free_pages=4, evictable_pages=1, sealed_pages=5),
        "draining": WorkerLoad(num_pages=10, free_pages=10, draining=True),
        "not_ready": WorkerLoad(num_pages=10, free_pages=10, ready=False),
    }
    async with fleet(*workers.values(), metrics=True) as running:
        assert (await look(running))("pdserve_kv_utilization_ratio", role="decode") == 0, "none has told yet"
        for name, load in loads.items():
            await workers[name].beat(load)
        await workers["suspect"].beat(WorkerLoad(num_pages=10, free_pages=10))
        running.router.hub.roster.suspect("suspect", workers["suspect"].incarnation)
        seen = await look(running)
    for state in names:
        assert seen("pdserve_workers", role="decode", state=state) == 1
        assert seen("pdserve_workers", role="prefill", state=state) == 0
    assert seen("pdserve_kv_utilization_ratio", role="decode") == pytest.approx(0.5 / 4)
    assert seen("pdserve_kv_utilization_ratio", role="prefill") == 0
    assert seen("pdserve_pages", role="decode", state="free") == 34


async def test_targets_are_the_router_and_the_workers_that_have_metrics() -> None:
    told, silent = FakeWorker("told", Role.PREFILL, metrics="10.0.0.7:9465"), FakeWorker("s", Role.DECODE)
    async with fleet(told, silent, metrics=True, fleet_metrics=("10.0.0.8:9466",)) as running:
        found = json.loads(await page(running.router, "/targets"))
        port = running.router.metrics_port
        assert found == [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"process": "router"}},
            {"targets": ["10.0.0.8:9466"], "labels": {"process": "fleet"}},
            {
                "targets": ["10.0.0.7:9465"],
                "labels": {"process": "worker", "worker": "told", "role": "prefill"},
            },
        ]
        await told.leave()
        assert len(json.loads(await page(running.router, "/targets"))) == 2


def test_an_address_of_a_fleet_process_must_be_one() -> None:
    with pytest.raises(ConfigError, match="fleet_metrics"):
        RouterConfig(fleet_metrics=("http://10.0.0.8:9466/metrics",))


# ---- names -------------------------------------------------------------------------------------------


async def test_vllm_names_say_the_same_and_what_an_endpoint_picker_reads() -> None:
    prefill, decode = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)
    common = {"model_name": "bytes", "engine": "0"}
    async with fleet(prefill, decode, metrics=True, vllm_metrics=True) as running:
        await decode.beat(WorkerLoad(num_pages=1024, free_pages=768, sealed_pages=256))
        await running.client.generate(PROMPT, max_tokens=4).result()
        seen = await look(running)
    assert seen("vllm:num_requests_waiting", **common) == seen("vllm:num_requests_running", **common) == 0
    assert seen("vllm:kv_cache_usage_perc", **common) == 0.25
    config = common | {"block_size": "16", "num_gpu_blocks": "2048"}
    assert seen("vllm:cache_config_info", **config) == 1
    lora = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert seen("vllm:lora_requests_info", **lora) > 0
    assert seen("vllm:prompt_tokens_total", **common) == len(PROMPT)
    assert seen("vllm:generation_tokens_total", **common) == 4
    assert seen("vllm:request_success_total", finished_reason="length", **common) == 1
    assert seen("vllm:request_success_total", finished_reason="stop", **common) == 0
    for theirs, ours in (("time_to_first_token", "ttft"), ("inter_token_latency", "itl")):
        name, mode = f"pdserve_{ours}_seconds", "disaggregated"
        assert seen(f"vllm:{theirs}_seconds_sum", **common) == seen(f"{name}_sum", mode=mode)
        for bound in ("0.01", "+Inf"):
            theirs_below = seen(f"vllm:{theirs}_seconds_bucket", le=bound, **common)
            assert theirs_below == seen(f"{name}_bucket", le=bound, mode=mode)
    for metric in catalogue.VLLM_ROUTER:
        name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
        assert name in seen.names


async def test_vllm_names_are_there_only_if_asked_for() -> None:
    async with fleet(FakeWorker("d", Role.DECODE), metrics=True) as running:
        assert "vllm:" not in await page(running.router)


def check_metrics(text: str) -> list[str]:
    """What `promtool check metrics` finds wrong."""
    command = [tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


async def test_promtool_finds_nothing_wrong_but_the_colon_of_vllm() -> None:
    worker = FakeWorker("d", Role.AGGREGATED)
    async with fleet(worker, metrics=True, vllm_metrics=True) as running:
        await running.client.generate(PROMPT, max_tokens=2).result()
        text = await page(running.router)
    ours = "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)
    assert check_metrics(ours) == []
    wrong = check_metrics(text)
    assert all(line.endswith("metric names should not contain ':'") for line in wrong), wrong
