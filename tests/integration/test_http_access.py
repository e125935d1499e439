"""Every HTTP route wants a key but those of probes: the routes are walked."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from router.config import RouterConfig
from router.http.routes import ROUTES, Route
from router.main import Router
from tests.support.leaks import leak_in
from tests.support.router_kit import SECRET

OPEN = {"/health", "/ready"}
KEY = "a-key-that-is-long-enough"


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router(
        RouterConfig(
            port=0, metrics=False, http=True, http_port=0, fleet_secret=SECRET.hex(), api_key=KEY,
            auth_failures_per_minute=5,
        )
    )  # fmt: skip
    await made.start()
    yield made
    await made.stop()


async def ask(router: Router, route: Route, **headers: str) -> tuple[int, str]:
    """Status and body of an empty request."""

    def blocking() -> tuple[int, str]:
        connection = http.client.HTTPConnection(urlsplit(router.http_url).netloc, timeout=30)
        path = route.path.replace("{model_id:path}", "some-model")
        connection.request(route.method, path, b"", {**headers, "content-type": "application/json"})
        response = connection.getresponse()
        status, body = response.status, response.read().decode()
        connection.close()
        return status, body

    return await asyncio.to_thread(blocking)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_a_route_is_open_or_wants_a_key(router: Router, route: Route) -> None:
    for headers in ({}, {"authorization": "Bearer guess"}, {"x-api-key": "guess"}):
        status, body = await ask(router, route, **headers)
        assert (status == 401) != (route.path in OPEN), body
        assert leak_in(body) == ""
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert (await ask(router, route, **headers))[0] != 401


async def test_the_openapi_page_wants_a_key(router: Router) -> None:
    page = Route(path="/openapi.json", handler=ROUTES[0].handler, summary="")
    assert (await ask(router, page))[0] == 401
    status, body = await ask(router, page, **{"x-api-key": KEY})
    assert status == 200
    assert "/v1/completions" in body


async def test_guesses_over_http_are_bounded(router: Router) -> None:
    models = next(route for route in ROUTES if route.path == "/v1/models")
    for _ in range(5):
        assert (await ask(router, models, authorization="Bearer guess"))[0] == 401
    status, body = await ask(router, models, authorization=f"Bearer {KEY}")
    assert status == 429, body
