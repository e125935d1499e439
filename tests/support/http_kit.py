"""A router with its HTTP API and scripted workers around it, and clients of the real packages.

What does not live here: what is expected of the answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from pdserve.api import Admitted, ChoiceEnd, End, GenerateInput, StreamEvent
from pdserve.types import FinishReason, Role, Usage
from router.caller import Caller
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
        return AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def anthropic(self, **options: Any) -> AsyncAnthropic:
        """Anthropic's client; it retries nothing unless asked to."""
        return AsyncAnthropic(base_url=self.url, **{"api_key": "none", "max_retries": 0, **options})

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


class Script:
    """In place of a hub's `generate`: gives these events, and keeps what was asked."""

    def __init__(self, api: Served, *events: StreamEvent) -> None:
        self.asked: list[GenerateInput] = []
        self._events = events
        api.fleet.router.hub.generate = self._generate  # type: ignore[method-assign]

    async def _generate(
        self, source: GenerateInput, time_left_s: float | None, caller: Caller
    ) -> AsyncIterator[StreamEvent]:
        self.asked.append(source)
        yield Admitted(request_id="a1", client_request_id=source.client_request_id, prompt_tokens=7)
        for event in self._events:
            yield event


def ended(choice: int = 0, why: FinishReason = FinishReason.STOP, **more: Any) -> ChoiceEnd:
    """The end of a choice."""
    return ChoiceEnd(choice=choice, finish_reason=why, **more)


END = End(finish_reason=FinishReason.STOP, usage=Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=5))
"""The end of every scripted stream."""
