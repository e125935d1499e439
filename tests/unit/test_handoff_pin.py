"""I/O pins on the source's pages: only for the key whose transfer holds the page, only for its generation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.types import Key
from prefill_worker.sources import Guard

MINE, OTHER = Key(request_id="mine"), Key(request_id="other")


@pytest.fixture
def pages() -> PageManager:
    made = PageManager(4, 7)
    request = Holder(HolderKind.REQUEST, "P:mine")
    for page in made.reserve(2, request) or ():
        made.fill(page)
        made.seal(page, 16)
        made.hold(page, Holder(HolderKind.TRANSFER, str(MINE)))
        made.drop(page, request)
    return made


@pytest.fixture
def handoff(pages: PageManager) -> Guard:
    def feed_soon(make: Callable[[float], list[Any]]) -> None:
        assert make(0.0) == []

    parts = SimpleNamespace(pages=pages)
    port: Any = SimpleNamespace(parts=parts, lock=threading.Lock(), feed_soon=feed_soon)
    role: Any = None
    return Guard(port, role)


def test_a_ticket_opens_the_pages_of_its_own_request_only(handoff: Guard, pages: PageManager) -> None:
    generation = pages.generation(0)
    assert handoff.pin(0, generation, MINE, "a")
    assert not handoff.pin(1, pages.generation(1), OTHER, "b")
    assert not handoff.pin(0, generation + 1, MINE, "c")
    assert not handoff.pin(3, pages.generation(3), MINE, "d"), "a free page"


def test_a_pinned_page_outlives_its_transfer_until_the_pin_goes(handoff: Guard, pages: PageManager) -> None:
    assert handoff.pin(0, pages.generation(0), MINE, "a")
    pages.drop(0, Holder(HolderKind.TRANSFER, str(MINE)))
    assert pages.state(0) is PageState.RETIRING
    handoff.unpin("a")
    handoff.unpin("a")
    assert pages.state(0) is PageState.FREE
    assert pages.check_integrity() == ""
