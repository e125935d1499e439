"""A router's `/livez` and `/readyz` say what its gRPC health service says, without a certificate."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest

import router.probes
from pdserve.types import Role
from router.main import Router
from tests.support.router_kit import FakeWorker, fleet, until_ready


def asked(router: Router, path: str) -> int:
    """The status that a probe sees."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{router.metrics_port}{path}", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_ready_once_requests_have_a_path_and_no_longer_when_draining() -> None:
    async with fleet(metrics=True) as empty:
        assert await asyncio.to_thread(asked, empty.router, "/livez") == 200
        assert await asyncio.to_thread(asked, empty.router, "/readyz") == 503
    async with fleet(FakeWorker("d0", Role.AGGREGATED), metrics=True) as serving:
        assert await asyncio.to_thread(asked, serving.router, "/readyz") == 200
        await serving.router.drain()
        assert await asyncio.to_thread(asked, serving.router, "/readyz") == 503
        assert await asyncio.to_thread(asked, serving.router, "/livez") == 200


async def test_not_ready_again_when_the_last_worker_leaves() -> None:
    worker = FakeWorker("d0", Role.AGGREGATED)
    async with fleet(worker, metrics=True, suspect_after_s=0.2, heartbeat_timeout_s=0.4) as serving:
        await until_ready(serving.router.address, ready=False)
        assert await asyncio.to_thread(asked, serving.router, "/readyz") == 503


async def test_an_event_loop_that_does_not_answer_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.probes, "ANSWER_TIMEOUT_S", 0.2)
    async with fleet(metrics=True) as empty:
        # Asked from the loop itself, which therefore waits for the answer and does nothing else.
        assert asked(empty.router, "/livez") == 503
        assert await asyncio.to_thread(asked, empty.router, "/livez") == 200
