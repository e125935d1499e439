"""The status page in a real browser: it follows the router, wants a key, asks nobody else for anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from pdserve.types import Role, WorkerLoad
from router.auth.keys import format_keys, make_key
from router.http.status_feed import MAX_WATCHERS
from tests.support.browser import chromium, fresh_page
from tests.support.http_kit import Served, served
from tests.support.router_kit import FakeWorker

LOAD = WorkerLoad(
    num_pages=100, free_pages=60, evictable_pages=15, filling_pages=20, quarantined_pages=5, num_running=3,
    num_waiting=2, waiting_tokens=1234,
)  # fmt: skip
MARKUP = "<img src=x onerror=document.title='hit'>"
ONE = {"prompt": "once", "max_tokens": 4}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


def card(page: Page, name: str) -> Locator:
    return page.locator(f'.card[data-name="{name}"] .value')


async def finished(api: Served, **headers: str) -> None:
    """One request of four tokens."""
    answer = await api.http.post("/v1/completions", json=ONE, headers=headers)
    assert answer.status_code == 200, answer.text


async def first_look(api: Served, **headers: str) -> dict[str, Any]:
    """What a watcher is told at once."""
    async with api.http.stream("GET", "/status/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = await anext(answer.aiter_lines())
    told: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return told


async def has_room(api: Served) -> bool:
    """Whether one more may watch."""
    async with api.http.stream("GET", "/status/events") as answer:
        return bool(answer.status_code == 200)


async def test_the_page_follows_the_router_and_asks_nobody_else(browser: Browser) -> None:
    async with fresh_page(browser) as opened:
        async with served() as api:
            page = opened.page
            await page.goto(f"{api.url}/status")
            await expect(page.locator("#state")).to_have_text("serving")
            await expect(page.locator("#router")).to_have_text(api.fleet.router.hub.router_id)
            await expect(card(page, "finished since start")).to_have_text("0")
            await expect(card(page, "TTFT p50")).to_have_text("-")
            await finished(api)
            await finished(api)
            await expect(card(page, "finished since start")).to_have_text("2")
            await expect(card(page, "TTFT p50")).to_contain_text("ms")
            await expect(page.locator('.card[data-name="tokens/s"] polyline')).to_have_count(1)
            await api.worker.beat(LOAD)
            cells = page.locator('tr[data-worker="d"] td')
            await expect(cells.nth(6)).to_have_text("25 % of 100")
            told = (await cells.all_text_contents())[:5]
            assert told == ["d", "decode", "ready", "3", "2 (1,234 tokens)"]
            parts = cells.nth(5).locator(".bar span")
            assert await parts.evaluate_all("all => all.map(each => each.title)") == [
                "60 free", "15 evictable", "20 filling", "5 quarantined",
            ]  # fmt: skip
            wide = await parts.evaluate_all("all => all.map(each => each.getBoundingClientRect().width)")
            assert wide[0] == sorted(wide)[-1]
            assert wide[0] / wide[2] > 2.5
            assert opened.complaints == []
            await api.worker.leave()
            await expect(page.locator("#workers tr")).to_have_count(0)
            own = api.url
        await expect(page.locator("#state")).to_contain_text("trying again")
        assert opened.elsewhere(own) == []


async def test_a_page_says_that_its_router_drains(browser: Browser) -> None:
    async with fresh_page(browser) as opened, served() as api:
        api.worker.pause_at = 1
        await opened.page.goto(f"{api.url}/status")
        async with api.http.stream("POST", "/v1/completions", json={**ONE, "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await expect(card(opened.page, "running")).to_have_text("1")
            api.fleet.router.hub.draining = True
            await expect(opened.page.locator("#state")).to_have_text("draining")
            api.worker.gate.set()


async def test_the_page_asks_for_a_key_and_again_when_it_is_revoked(browser: Browser, tmp_path: Path) -> None:
    key, entry = make_key("shop", admin=False, note="", lives_s=None, now=time.time())
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_bytes(format_keys([entry]))
    async with fresh_page(browser) as opened, served(api_key_file=str(file)) as api:
        page = opened.page
        await page.goto(f"{api.url}/status")
        await expect(page.locator("#why")).to_have_text("This router wants an API key.")
        await expect(page.locator("#page")).to_be_hidden()
        assert api.fleet.router.hub.router_id not in await page.content()
        for wrong in ("kéy", "a guess", f"{key}x"):
            await page.fill("#key", wrong)
            await page.click("button")
            await expect(page.locator("#why")).not_to_have_text("This router wants an API key.")
            await expect(page.locator("#page")).to_be_hidden()
        await expect(page.locator("#why")).to_contain_text("key")
        await page.fill("#key", key)
        await page.click("button")
        await expect(page.locator("#state")).to_have_text("serving")
        assert key not in await page.content()
        kept = await page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
        assert kept == ["", 0, 0]
        assert not [url for url in opened.asked if key in url]
        file.write_bytes(format_keys([]))
        await expect(page.locator("#ask")).to_be_visible()


async def test_only_the_files_are_for_everybody_and_they_tell_nothing() -> None:
    key = "a-key-that-is-long-enough"
    async with served(api_key=key) as api:
        for path in ("/status", "/status/page.js", "/status/page.css"):
            answer = await api.http.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert api.fleet.router.hub.router_id not in answer.text
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        for headers in ({}, {"x-api-key": "guess"}):
            assert (await api.http.get("/status/events", headers=headers)).status_code == 401
        told = await first_look(api, authorization=f"Bearer {key}")
        assert told["state"] == "serving"
        assert api.worker.record.peer.control not in json.dumps(told)


async def test_names_are_shown_as_text_and_the_policy_lets_nothing_in(browser: Browser) -> None:
    strange = FakeWorker(MARKUP, Role.DECODE)
    async with fresh_page(browser) as opened, served() as api:
        page = opened.page
        await strange.start()
        try:
            assert (await strange.join(api.fleet.router.address)).accepted
            await page.goto(f"{api.url}/status")
            await expect(page.locator("#workers tr")).to_have_count(2)
            assert MARKUP in await page.locator("#workers td:first-child").all_text_contents()
            assert await page.locator("#workers img").count() == 0
            assert await page.title() == "pdserve: serving"
            tried = "() => fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
            assert await page.evaluate(tried) == "refused"
            assert any("Content Security Policy" in each for each in opened.complaints)
            inline = "() => { document.body.innerHTML = '<b>x</b>'; }"
            refused = await page.evaluate(
                f"() => {{ try {{ ({inline})(); }} catch (e) {{ return e.name; }} }}"
            )
            assert refused == "TypeError"
        finally:
            await strange.kill()


async def test_watchers_are_bounded_and_leave_their_place() -> None:
    async with served() as api:
        async with AsyncExitStack() as watching:
            limits = httpx2.Limits(max_connections=MAX_WATCHERS + 2)
            http = await watching.enter_async_context(
                httpx2.AsyncClient(base_url=api.url, timeout=30, limits=limits)
            )
            followed = []
            for _ in range(MAX_WATCHERS):
                answer = await watching.enter_async_context(http.stream("GET", "/status/events"))
                followed.append(answer.aiter_lines())
                await anext(followed[-1])
            refused = await http.get("/status/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        async with asyncio.timeout(30):
            while not await has_room(api):
                pass


async def test_watchers_that_come_at_once_are_bounded_too() -> None:
    asked = b"GET /status/events HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served() as api:
        host, _, port = api.url.removeprefix("http://").rpartition(":")
        dialled = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_WATCHERS + 8)]
        for _, writer in dialled:
            writer.write(asked)
        told = [await reader.readline() for reader, _ in dialled]
        for _, writer in dialled:
            writer.close()
    assert told.count(b"HTTP/1.1 200 OK\r\n") == MAX_WATCHERS
    assert told.count(b"HTTP/1.1 429 Too Many Requests\r\n") == 8
