"""`pdserve bench serving` as a process of its own against a router with scripted workers."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from pdserve.types import Role
from tests.support.commands import INTERRUPTIBLE
from tests.support.router_kit import FakeWorker, fleet


async def bench(address: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *INTERRUPTIBLE, "bench", "serving", "--address", address, *arguments, stdout=PIPE, stderr=PIPE
    )


async def test_it_sends_what_it_says_and_reports_latencies_and_throughput(tmp_path: Path) -> None:
    decode, target = FakeWorker("d", Role.DECODE), tmp_path / "out.json"
    async with fleet(decode) as running:
        process = await bench(
            running.router.address, "--requests", "6", "--concurrency", "2", "--prompt-tokens", "20",
            "--output-tokens", "5", "--warmup", "2", "--json", str(target),
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert len(decode.reserves) == 8
    assert {len(call.token_ids) for call in decode.reserves} == {20}
    assert len({tuple(call.token_ids) for call in decode.reserves}) == 8
    assert {(call.sampling.max_tokens, call.use_prefix_cache) for call in decode.reserves} == {(5, False)}
    document = json.loads(target.read_text())
    assert (document["format"], document["kind"]) == ("pdserve.bench/1", "serving")
    assert (document["settings"]["concurrency"], document["settings"]["model"]) == (2, "bytes")
    (case,) = document["cases"]
    assert (case["requests"], case["failed"], case["output_tokens"]) == (6, 0, 30)
    assert 0 < case["ttft_p50_ms"] <= case["ttft_p99_ms"]
    assert 0 <= case["itl_p50_ms"] <= case["itl_p99_ms"]
    assert case["tokens_per_s"] * case["elapsed_s"] == pytest.approx(30)
    assert b"output tokens/s" in out
    assert b"6/6 done, 0 failed" in err


async def test_a_rate_starts_requests_however_many_run() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 1
    async with fleet(decode) as running:
        process = await bench(
            running.router.address, "--requests", "5", "--rate", "200", "--warmup", "0",
            "--output-tokens", "3",
        )  # fmt: skip
        for _ in range(5):  # none ends before all have begun
            await decode.wait_for("paused")
        decode.gate.set()
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert b"200 requests/s" in out


async def test_prompts_that_the_model_can_not_take_are_refused_before_any_is_sent() -> None:
    decode = FakeWorker("d", Role.DECODE)
    async with fleet(decode) as running:
        process = await bench(running.router.address, "--prompt-tokens", "100000")
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert err.decode().startswith("error: invalid_request: prompt_tokens: ")
    assert decode.reserves == []


async def test_without_a_router_it_says_so() -> None:
    process = await bench("127.0.0.1:1")
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert err.decode().startswith("error: unavailable: ")
    assert err.count(b"\n") == 1


async def test_ctrl_c_cancels_what_runs_and_ends_without_a_traceback() -> None:
    decode = FakeWorker("d", Role.DECODE)
    decode.pause_at = 1
    async with fleet(decode) as running:
        process = await bench(running.router.address, "--warmup", "0", "--concurrency", "1")
        await decode.wait_for("paused")
        process.send_signal(signal.SIGINT)
        await decode.wait_for("cancel_decode")
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in out + err
