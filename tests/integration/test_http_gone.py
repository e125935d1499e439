"""Clients that hang up in the midst of a stream: their requests are cancelled and all pages come back.

A real router and two real workers of a tiny model. Readers that only stop reading: `test_http_stalled`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.edge_kit import Edge

LONG = 440
CHAT = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "once", "max_tokens": LONG, "ignore_eos": True, "n": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": LONG, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    made = Edge.start(tmp_path_factory.mktemp("edge"), "--http-port", "0")
    yield made
    made.stack.stop()


@pytest.fixture(scope="module")
def http(edge: Edge) -> Iterator[httpx2.Client]:
    assert edge.stack.router.stdout is not None
    found = next(
        filter(None, (re.search(r"HTTP API on (\S+)/v1", line) for line in edge.stack.router.stdout))
    )
    with httpx2.Client(base_url=found[1], headers={"x-api-key": edge.keys["shop"]}, timeout=60) as client:
        yield client


def outcomes(http: httpx2.Client) -> dict[str, float]:
    """Requests by how they ended."""
    text = http.get("/metrics").text
    return {
        name: float(n) for name, n in re.findall(r'pdserve_requests_total\{outcome="(\w+)"\} (\S+)', text)
    }


@pytest.mark.parametrize("path", ROUTES)
def test_a_client_that_hangs_up_has_its_request_cancelled(edge: Edge, http: httpx2.Client, path: str) -> None:
    before = outcomes(http)
    with http.stream("POST", path, json={**ROUTES[path], "stream": True}) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_lines()).startswith("data: ")
    edge.stack.until(lambda status: outcomes(http) != before)
    edge.stack.until_idle()
    assert outcomes(http) == {**before, "cancelled": before.get("cancelled", 0) + 1}
