"""Bad bytes in a cache, and what a page still holds of the one before: between processes.

A page that went bad at the source must not be served for ever, nor may anything be computed from it unseen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from tests.support.chaos import Step
from tests.support.integrity import PAGE, Bench

FULL_PAGES = 4


def prompt(seed: int, length: int = FULL_PAGES * PAGE + 8) -> tuple[int, ...]:
    return tuple(200 + (seed * 7919 + i * 104729) % 40000 for i in range(length))


async def test_a_cached_page_that_went_bad_is_unpublished_with_all_chained_after_it(
    bench: Bench, way: str
) -> None:
    """Decode asks for it: its digest, taken when it was good, shows."""
    tokens = prompt(1 if way == "shm" else 2)
    cached = {"use_prefix_cache": True, "decode_may_hit": False}
    await bench.run(way, tokens, **cached)
    bench.prefill.pool.flip(bench.announced()[1].page.page, 77)
    bad = await bench.run(way, tokens, **cached)
    bad.assert_computed_by_decode()
    assert bad.prefill["source_corrupt"] == 1
    after = await bench.run(way, tokens, **cached)
    assert after.ended.ledger.prefill_cached_tokens == PAGE, "the page before the bad one is still there"
    after.assert_repaired(resent=0)
    again = await bench.run(way, tokens, **cached)
    assert again.ended.ledger.prefill_cached_tokens == FULL_PAGES * PAGE, "computed anew, cached anew"
    again.assert_repaired(resent=0)


async def test_a_cached_page_that_decode_has_too_is_checked_before_more_is_computed_from_it(
    bench: Bench, way: str
) -> None:
    """Decode never asks for it. Pages computed from it would be wrong with digests that are right."""
    tokens = prompt(3 if way == "shm" else 4)
    await bench.run(way, tokens, use_prefix_cache=True)
    bench.prefill.pool.flip(bench.announced()[1].page.page, bench.prefill.pool.page_bytes // 2 + 3)
    longer = (*tokens, *prompt(5, 40))
    bench.relay.reset()
    bad = await bench.run(way, longer, use_prefix_cache=True)
    bad.assert_computed_by_decode()
    assert bad.ended.ledger.decode_hit_tokens == FULL_PAGES * PAGE
    assert bad.prefill["source_corrupt"] == 1
    assert bench.announced() == {}, "nothing that was computed from it was announced"
    other = (*tokens, *prompt(6, 40))
    after = await bench.run(way, other, use_prefix_cache=True)
    assert after.ended.ledger.prefill_cached_tokens == PAGE
    assert after.ended.ledger.decode_computed_prompt_tokens == 0


async def test_a_digest_is_taken_even_of_a_page_that_nobody_asked_for(bench: Bench, way: str) -> None:
    """Decode had the prefix, prefill computed it: it goes bad later, and is noticed all the same."""
    tokens = prompt(7 if way == "shm" else 8)
    await bench.run(way, tokens, use_prefix_cache=True, prefill_may_hit=False)  # decode's cache has it
    await bench.run(way, (*tokens, 9, 9), use_prefix_cache=True)  # prefill's cache has it, unasked for
    pool = bench.prefill.pool
    for page in pool.find(await first_page(bench, way, tokens)):  # copies in free pages do no harm
        pool.flip(page, 5000)
    bad = await bench.run(way, (*tokens, *prompt(9, 40)), use_prefix_cache=True)
    bad.assert_computed_by_decode()
    assert bad.prefill["source_corrupt"] == 1


async def first_page(bench: Bench, way: str, tokens: tuple[int, ...]) -> bytes:
    """How the first page of these tokens starts wherever it lies: by computing it once more."""
    await bench.run(way, tokens)
    return bench.prefill.pool.read(bench.announced()[0].page.page)[:4096]


@pytest.mark.parametrize("length", [1, FULL_PAGES * PAGE + 1])
async def test_nothing_of_the_tenant_before_is_left_in_a_page(bench: Bench, length: int) -> None:
    """Every page of the pool was some tenant's; the next one's tail has one row, and zeros."""
    frames: list[bytes] = []

    def page(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
        frames.append(bytes(payload))
        return [header, bytes(payload)]

    await bench.run("tcp", prompt(11, 160), tenant="before")
    pool = bench.prefill.pool
    before = bench.announced()
    assert all(used(pool.read(m.page.page)) > 0.9 for m in before.values())
    bench.reset()
    bench.proxy.page = page
    await bench.run("tcp", prompt(12, length), tenant="after")
    tail = bench.announced()[length // PAGE]
    assert tail.page.page in {m.page.page for m in before.values()}, "the very page of the tenant before"
    assert used(frames[-1]) <= 1 / PAGE
    assert used(pool.read(tail.page.page)) <= 1 / PAGE


def used(payload: bytes) -> float:
    """Share of 4-byte words that are not zero."""
    words = np.frombuffer(payload, np.uint32)
    return np.count_nonzero(words) / len(words)
