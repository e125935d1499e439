"""A router with its HTTP API and scripted workers around it, and clients of the real packages.

What does not live here: what is expected of the answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import AsyncOpenAI

from pdserve.types import Role
from tests.support.router_kit import FakeWorker, Fleet, fleet


@dataclass
class Served:
    """A running router, its only worker, and a bare HTTP client of it."""

    fleet: Fleet
    worker: FakeWorker
    http: httpx2.AsyncClient

    @property
    def url(self) -> str:
        return self.fleet.router.http_url

    def openai(self, **options: Any) -> AsyncOpenAI:
        """OpenAI's client; it retries nothing unless asked to."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, **options})

    async def post(self, path: str, body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body)


@asynccontextmanager
async def served(**config: Any) -> AsyncIterator[Served]:
    """A router with one scripted decode worker, over HTTP."""
    worker = FakeWorker("d", Role.DECODE)
    async with (
        fleet(worker, http=True, **config) as running,
        httpx2.AsyncClient(base_url=running.router.http_url, timeout=30) as http,
    ):
        yield Served(running, worker, http)
