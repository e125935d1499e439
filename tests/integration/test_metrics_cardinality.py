"""Callers can not make series: 10,000 hostile requests leave exactly those that were there at the start."""

from __future__ import annotations

import asyncio
import http.client
import random
from collections.abc import Callable
from urllib.parse import quote, urlsplit

import pytest
from prometheus_client import CollectorRegistry

from pdserve.api import GenerateInput, SamplingInput
from pdserve.errors import PdserveError
from pdserve.types import Role
from router.caller import Caller
from router.main import Router
from tests.support.byte_model import CONTEXT
from tests.support.router_kit import FakeWorker, Fleet, fleet

KEY = "a-key-that-is-long-enough"
INSIDE, AT_THE_DOOR, OVER_HTTP, SERVED = 6000, 3000, 800, 200
NASTY = ('"', "\\", "\n", "{", "}", "=", "é", "\x00", "🦀", "outcome", " ", "x")


def series(registry: CollectorRegistry) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {(s.name, frozenset(s.labels.items())) for f in registry.collect() for s in f.samples}


def text(rng: random.Random, length: int = 12) -> str:
    return "".join(rng.choice(NASTY) for _ in range(length)) + str(rng.random())


def bad(rng: random.Random) -> GenerateInput:
    """A request that is refused: wrong in one of many ways, and no other has the same."""
    name = text(rng)
    wrong: tuple[Callable[[], GenerateInput], ...] = (
        lambda: GenerateInput(prompt="a", model=name),
        lambda: GenerateInput(prompt=""),
        lambda: GenerateInput(token_ids=(rng.randrange(1 << 31, 1 << 40),)),
        lambda: GenerateInput(prompt="a", sampling=SamplingInput(temperature=rng.uniform(-9, -1))),
        lambda: GenerateInput(prompt="a" * CONTEXT + name),
        lambda: GenerateInput(prompt="a", n=rng.randrange(1 << 10, 1 << 20)),
        lambda: GenerateInput(prompt="a", stop=(name,) * 50),
        lambda: GenerateInput(prompt="a", resume_window_s=rng.uniform(1, 9)),
        lambda: GenerateInput(prompt="a", client_request_id=name * 100, trace_id=name),
    )
    return rng.choice(wrong)()


async def generate(router: Router, source: GenerateInput, tenant: str) -> bool:
    """Whether it was served."""
    try:
        async for _ in router.hub.generate(source, None, Caller(tenant=tenant, key_id=tenant)):
            pass
    except PdserveError:
        return False
    return True


def knock(router: Router, rng: random.Random) -> None:
    """A caller with a made-up credential."""
    header = rng.choice(("authorization", "x-api-key", text(rng)))
    with pytest.raises(PdserveError):
        router.auth.check([(header, rng.choice(("Bearer ", "")) + text(rng))], peer=text(rng))


def over_http(url: str, rng: random.Random) -> None:
    """Requests on one connection: any method and path, any names."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    for _ in range(OVER_HTTP):
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/models/", "/metrics/", "/"))
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS"))
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        body = f'{{"model": "{rng.random()}", "prompt": "x", "{rng.random()}": 1}}'
        connection.request(method, path + quote(text(rng)), body, headers)
        answer = connection.getresponse()
        answer.read()
        assert 400 <= answer.status < 500
    connection.close()


async def hostile(running: Fleet, rng: random.Random) -> None:
    router = running.router
    for _ in range(INSIDE):
        assert not await generate(router, bad(rng), text(rng))
    for _ in range(AT_THE_DOOR):
        knock(router, rng)
    await asyncio.to_thread(over_http, router.http_url, random.Random(rng.random()))
    for _ in range(SERVED):
        name = f"{rng.getrandbits(128):032x}"
        sampling = SamplingInput(max_tokens=2)
        source = GenerateInput(prompt="a", client_request_id=name, trace_id=name, sampling=sampling)
        assert await generate(router, source, text(rng))


async def test_ten_thousand_hostile_requests_make_no_series() -> None:
    assert INSIDE + AT_THE_DOOR + OVER_HTTP + SERVED == 10_000
    rng = random.Random(7)
    prefill, decode = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)
    async with fleet(
        prefill, decode, metrics=True, http=True, vllm_metrics=True, api_key=KEY, auth_failures_per_minute=0
    ) as running:
        registry = running.router.hub.metrics.registry
        before = series(registry)
        await hostile(running, rng)
        after = series(registry)
        counted = sum(
            s.value for f in registry.collect() for s in f.samples if s.name == "pdserve_requests_total"
        )
    assert after == before
    assert counted >= INSIDE + SERVED
