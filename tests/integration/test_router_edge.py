"""The router's sockets: garbage, size limits, where it listens, health, reflection, metrics, start, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError, PdserveError
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import METADATA_KEY, authenticated, fleet_token
from pdserve.rpc.server import RpcServer, ServerOptions, check_bind
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, decode_pb2, decode_pb2_grpc, inference_pb2_grpc
from pdserve.rpc.v1.inference_pb2 import GetStatusRequest
from pdserve.types import REBALANCE_OUTCOMES, Role, WorkerLoad
from router.config import RouterConfig
from router.main import Router, serve
from router.service import CLUSTER, INFERENCE
from tests.support.byte_model import completion
from tests.support.router_kit import SECRET, FakeWorker, Fleet, fleet

ROOT = Path(__file__).resolve().parents[2]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GARBAGE = {
    "zeros": bytes(4096),
    "http1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "preface only": PREFACE,
    "huge frame": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 5000,
    "bad settings": PREFACE + b"\x00\x00\x05\x04\x00\x00\x00\x00\x00abcde",
    "pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94",
    "noise": bytes((i * i * 31 + i) % 256 for i in range(20000)),
}

TOKEN = ((METADATA_KEY, fleet_token(SECRET)),)


async def serves(running: Fleet) -> None:
    result = await running.client.generate("ok?", max_tokens=3).result()
    assert result.token_ids == completion(tuple(b"ok?"), 3)


async def throw(address: str, data: bytes) -> None:
    """Sends bytes and hangs up without waiting for an answer."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


async def test_garbage_on_the_port_harms_nothing() -> None:
    async with fleet(FakeWorker("d", Role.DECODE)) as running:
        for data in GARBAGE.values():
            await throw(running.router.address, data)
        await serves(running)
        status = await running.client.get_status()
        assert (status.running, status.queued) == (0, 0)


async def test_requests_that_are_no_message_get_an_error() -> None:
    async with fleet(FakeWorker("d", Role.DECODE)) as running:
        channel = open_channel(running.router.address)
        for method, code in (
            (f"/{INFERENCE}/Generate", grpc.StatusCode.INVALID_ARGUMENT),
            (f"/{CLUSTER}/Join", grpc.StatusCode.INVALID_ARGUMENT),
            (f"/{INFERENCE}/Nothing", grpc.StatusCode.UNIMPLEMENTED),
            ("/Nobody/Nothing", grpc.StatusCode.UNIMPLEMENTED),
        ):
            call: Any = channel.unary_stream(method)(b"\xff\xff\xff\xff", metadata=TOKEN)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is code
            assert "class" not in (caught.value.details() or "")
        await channel.close(None)
        await serves(running)


async def test_messages_and_metadata_over_the_limits_are_refused() -> None:
    async with fleet(FakeWorker("d", Role.DECODE)) as running:
        with pytest.raises(PdserveError, match="4 MB") as caught:
            await running.client.generate("x" * (5 << 20)).result()
        assert caught.value.label == "invalid_request"
        channel = open_channel(running.router.address)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetStatus(GetStatusRequest(), metadata=(("x-large", "y" * 20_000),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await channel.close(None)
        await serves(running)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
async def test_other_addresses_than_loopback_need_the_flag(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure") as caught:
        RpcServer(ServerOptions(host=host))
    assert host not in caught.value.message
    check_bind(host, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_flag(host: str) -> None:
    check_bind(host, insecure=False)


async def test_a_port_in_use_is_said_so() -> None:
    async with fleet() as running:
        port = int(running.router.address.rpartition(":")[2])
        second = Router(RouterConfig(port=port, metrics=False, http=False, fleet_secret=SECRET.hex()))
        with pytest.raises(ConfigError, match=str(port)):
            await second.start()


async def test_a_router_without_a_secret_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDSERVE_FLEET_SECRET", raising=False)
    for bad in ({}, {"fleet_secret": "xyz"}, {"fleet_secret": "ab"}, {"secret_file": "/nowhere"}):
        with pytest.raises(ConfigError):
            Router(RouterConfig(port=0, **bad))
    (tmp_path / "secret").write_text(SECRET.hex() + "\n")
    assert RouterConfig(secret_file=str(tmp_path / "secret")).secret_bytes() == SECRET
    assert RouterConfig().secret_bytes({"PDSERVE_FLEET_SECRET": SECRET.hex()}) == SECRET
    assert SECRET.hex() not in repr(RouterConfig(fleet_secret=SECRET.hex()))


# ---- errors that are nobody's plan -------------------------------------------------------------------


class Faulty(decode_pb2_grpc.DecodeServiceServicer):
    async def Reserve(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield decode_pb2.ReserveResponse()
        raise KeyError("/secret/path")

    async def CancelDecode(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise KeyError("/secret/path")

    async def SwitchLocal(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise ConfigError("set this")


async def test_an_unexpected_exception_is_neutral_for_the_client_and_whole_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = RpcServer(ServerOptions())
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Faulty(), server.server)
    await server.start()
    channel = open_channel(server.address)
    stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
    for num_logged, call in enumerate((cancel(stub), reserve(stub)), 1):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")
        assert caplog.text.count("KeyError: '/secret/path'") == num_logged
    with pytest.raises(grpc.aio.AioRpcError, match="set this") as caught:
        await stub.SwitchLocal(decode_pb2.SwitchLocalRequest())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await channel.close(None)
    await server.stop()


async def cancel(stub: Any) -> None:
    await stub.CancelDecode(decode_pb2.CancelDecodeRequest())


async def reserve(stub: Any) -> None:
    async for _ in stub.Reserve(decode_pb2.ReserveRequest()):
        pass


# ---- health, reflection, metrics ---------------------------------------------------------------------


async def health(address: str, service: str) -> int:
    channel = open_channel(address)
    try:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)
    finally:
        await channel.close(None)


async def test_health_says_whether_a_request_has_a_path() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with fleet(FakeWorker("p", Role.PREFILL)) as running:
        address = running.router.address
        assert await health(address, "") == serving
        assert await health(address, CLUSTER) == serving
        assert await health(address, INFERENCE) == not_serving  # nobody decodes
    async with fleet(FakeWorker("d", Role.DECODE)) as running:
        assert await health(running.router.address, INFERENCE) == serving
        await running.router.drain()
        assert await health(running.router.address, INFERENCE) == not_serving
        assert await health(running.router.address, "") == not_serving


@pytest.mark.parametrize("on", [True, False])
async def test_reflection_is_there_only_when_asked_for(on: bool) -> None:
    async with fleet(reflection=on) as running:
        channel = open_channel(running.router.address)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if on:
            answer = await call.read()
            assert INFERENCE in [service.name for service in answer.list_services_response.service]
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close(None)


async def scrape(router: Router) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and label values, as prometheus' own parser reads them."""
    url = f"http://127.0.0.1:{router.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(s.labels.values())): s.value for f in families for s in f.samples}


async def test_metrics_tell_latencies_outcomes_and_pages() -> None:
    prefill, decode = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)
    async with fleet(prefill, decode, metrics=True) as running:
        await decode.beat(WorkerLoad(num_pages=100, free_pages=60, sealed_pages=40))
        await running.client.generate("abc", max_tokens=5).result()
        with pytest.raises(PdserveError):
            await running.client.generate("").result()
        samples = await scrape(running.router)
    assert samples["pdserve_requests_total", ("length",)] == 1
    assert samples["pdserve_requests_total", ("invalid_request",)] == 1
    split = ("disaggregated",)
    counts = {name: samples[f"pdserve_{name}_seconds_count", split] for name in ("ttft", "itl", "e2e")}
    assert counts == {"ttft": 1, "itl": 4, "e2e": 1}
    assert samples["pdserve_queue_seconds_count", ()] == samples["pdserve_handovers_total", split] == 1
    assert samples["pdserve_prefill_seconds_count", ()] == samples["pdserve_transfer_seconds_count", ()] == 1
    assert samples["pdserve_pages", ("decode", "free")] == 60
    assert samples["pdserve_pages", ("decode", "sealed")] == 40
    assert samples["pdserve_pages", ("prefill", "free")] == 0
    assert samples["pdserve_workers", ("decode", "ready")] == 1
    assert samples["pdserve_kv_utilization_ratio", ("decode",)] == 0.4
    assert samples["pdserve_tokens_total", ("completion",)] == 5
    assert samples["pdserve_running_requests", ()] == samples["pdserve_queued_requests", ()] == 0


async def test_metrics_tell_of_experts_from_the_start_and_add_up_by_role() -> None:
    workers = [FakeWorker(name, Role.AGGREGATED) for name in ("one", "two")]
    async with fleet(*workers, metrics=True) as running:
        before = await scrape(running.router)
        for count, worker in enumerate(workers, 1):
            load = WorkerLoad(
                rebalances_rank_lost=count,
                lost_ranks=1,
                expert_copied_bytes=7,
                expert_imbalance=1 + count,
                expert_balance_loss=1.5 - 0.1 * count,
            )
            await worker.beat(load)
        after = await scrape(running.router)
    for role in Role:
        wanted = role is Role.AGGREGATED
        for outcome in REBALANCE_OUTCOMES:
            assert before["pdserve_rebalances", (outcome, role)] == 0
            rank_lost = wanted and outcome == "rank_lost"
            assert after["pdserve_rebalances", (outcome, role)] == 3 * rank_lost
        assert before["pdserve_lost_ranks", (role,)] == 0
        assert after["pdserve_lost_ranks", (role,)] == 2 * wanted
        assert after["pdserve_expert_copied_bytes", (role,)] == 14 * wanted
        assert after["pdserve_expert_imbalance", (role,)] == 3 * wanted, "the worst worker's"
        assert before["pdserve_expert_balance_loss", (role,)] == 0
        assert after["pdserve_expert_balance_loss", (role,)] == 1.4 * wanted


# ---- the Join stream ---------------------------------------------------------------------------------


async def test_a_join_stream_begins_with_register() -> None:
    async with fleet() as running:
        channel = open_channel(running.router.address)
        stub: Any = authenticated(cluster_pb2_grpc.ClusterServiceStub(channel), SECRET)
        for first in (cluster_pb2.JoinRequest(heartbeat={}), cluster_pb2.JoinRequest()):
            call = stub.Join()
            await call.write(first)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close(None)


async def test_a_worker_beyond_loopback_needs_the_flag_too() -> None:
    worker = FakeWorker("d", Role.DECODE)
    async with fleet() as running:
        await worker.start()
        peer = replace(worker.record.peer, control="192.0.2.1:50052")
        event = convert.Register(record=replace(worker.record, peer=peer), monotonic_s=0.0)
        answer = running.router.hub.roster.register(event, object())
        assert not answer.accepted
        assert "--insecure" in answer.problem
        await worker.kill()


# ---- the process -------------------------------------------------------------------------------------


async def test_serve_runs_until_a_signal_and_drains() -> None:
    ready = asyncio.Event()
    config = RouterConfig(port=0, metrics_port=0, http_port=0, fleet_secret=SECRET.hex())
    task = asyncio.ensure_future(serve(config, ready))
    async with asyncio.timeout(10):
        await ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await task


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_router_loads_no_torch_and_no_ray() -> None:
    assert not loaded_by("import router.main") & {"torch", "ray", "numpy", "triton", "transformers"}


def test_the_client_loads_little_and_grpc_only_when_used() -> None:
    heavy = {
        "torch",
        "ray",
        "numpy",
        "tokenizers",
        "jinja2",
        "prometheus_client",
        "grpc_status",
    }
    assert not loaded_by("import pdserve.client") & (heavy | {"grpc", "google"})
    code = (
        "import pdserve.client as c, pdserve.errors as e\n"
        "try:\n    c.Client('127.0.0.1:1').get_status()\nexcept e.Unavailable:\n    pass"
    )
    assert not loaded_by(code) & heavy
