"""A real headless Chromium, driven by playwright; what it complained about is kept.

What does not live here: what a page must show.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from tests.support.tools import tool


@dataclass
class Opened:
    """A page. asked: every address that the browser asked for. complaints: errors of its console."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def elsewhere(self, url: str) -> list[str]:
        """What it asked of others than this server."""
        own = urlsplit(url).netloc
        return [each for each in self.asked if urlsplit(each).netloc != own and not each.startswith("data:")]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser process of its own."""
    async with async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = await driver.chromium.launch(executable_path=tool("chromium"), args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def fresh_page(browser: Browser) -> AsyncIterator[Opened]:
    """An empty page, with no profile and no cache."""
    context = await browser.new_context()
    try:
        opened = Opened(await context.new_page())
        opened.page.on("request", lambda request: opened.asked.append(request.url))
        opened.page.on("console", lambda said: _note(opened, said))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        yield opened
    finally:
        await context.close()


def _note(opened: Opened, said: ConsoleMessage) -> None:
    if said.type == "error":
        opened.complaints.append(said.text)
