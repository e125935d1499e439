"""Pages move while later chunks compute, and the prefill worker lets go of them as they are acknowledged.

Real processes and the default model as it is served. How good the figures are is measured by
benchmarks.handover; here they must be there, be plausible on a busy machine, and fit the pages that moved.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import pytest

from pdserve.client import Ledger
from pdserve.types import Phase, Role, WorkerLoad
from tests.support.stack import Stack

LENGTH, PAGE_SIZE, RUNS = 2048, 16, 3
PAGES = LENGTH // PAGE_SIZE
CHUNK = 256
POOL = 3 * PAGES


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack.start(
        {Role.PREFILL: 1, Role.DECODE: 1}, dtype="bfloat16", deterministic=False, num_pages=POOL,
        prefill_chunk_tokens=CHUNK, token_budget=2 * CHUNK,
    )  # fmt: skip
    yield made
    made.stop()


def ask(stack: Stack, seed: int, *, cached: bool) -> Ledger:
    tokens = random.Random(seed).choices(range(100, 40000), k=LENGTH)
    with stack.client() as client:
        stream = client.generate(
            token_ids=tokens, max_tokens=2, temperature=0.0, ignore_eos=True, no_prefix_cache=not cached,
            deadline_s=120.0,
        )  # fmt: skip
        return stream.result().ledger


def loads(stack: Stack) -> dict[str, WorkerLoad]:
    """Once no worker says any more that it uses a page."""
    stack.until_idle()
    status = stack.until(lambda s: not any(sum(a.counts) for w in s.workers for a in w.load.page_ages))
    return {w.record.peer.worker_id: w.load for w in status.workers}


def test_most_of_a_transfer_hides_and_pages_go_as_they_are_acknowledged(stack: Stack) -> None:
    ledgers = [ask(stack, seed, cached=False) for seed in range(RUNS)]
    for ledger in ledgers:
        assert (ledger.transfer.path, ledger.transfer.pages) == ("shm", PAGES)
        assert ledger.decode_computed_prompt_tokens == 0
        assert ledger.handover_s is not None
        assert 0 < ledger.handover_s < 2.0
        chunks = [s.count for s in ledger.spans if s.phase is Phase.COMPUTE]
        assert sum(chunks) == LENGTH
        assert chunks[-1] < CHUNK / 2, "the last chunk is short: no later one hides its pages"
    assert statistics.median(ledger.wire_hidden or 0.0 for ledger in ledgers) >= 0.5
    found = loads(stack)
    prefill = found["prefill-0"]
    assert 0 < prefill.peak_transfer_pages < PAGES, "pages were acknowledged while others were computed"
    assert prefill.transfer_pages == 0
    for load in found.values():
        assert (load.free_pages, load.evictable_pages) == (POOL, 0), "nothing of it was to be cached"


def test_a_cached_prompt_stays_in_the_cache_and_nowhere_else(stack: Stack) -> None:
    ledger = ask(stack, RUNS, cached=True)
    assert ledger.transfer.pages == PAGES
    for load in loads(stack).values():
        assert load.evictable_pages == PAGES
        assert load.free_pages == POOL - PAGES
