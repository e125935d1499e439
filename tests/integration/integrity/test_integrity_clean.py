"""Nothing is wrong, and nothing is called wrong: many clean transfers at once, over both ways."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.messages import Ended, Nack
from pdserve.types import SamplingParams
from tests.support import direct as dx
from tests.support.integrity import PAGE, WAYS, Bench

ALARMS = (
    "reads_mismatch", "reads_stale", "reads_failed", "wrong_content_key", "source_corrupt", "quarantined",
    "refused_tickets", "foreign_envelopes", "unsent_messages", "over_credit",
)  # fmt: skip
SAMPLING = SamplingParams(max_tokens=2, ignore_eos=True)


def prompts(num_prompts: int, length: int) -> list[tuple[int, ...]]:
    return [
        tuple(300 + (n * 15485863 + i * 32452843) % 40000 for i in range(length)) for n in range(num_prompts)
    ]


async def wave(bench: Bench, asked: list[tuple[str, tuple[int, ...]]], **changes: Any) -> list[Ended]:
    """All at once; every answer is the aggregated one. Ends idle: the next wave needs most of the pages."""
    asks = [bench.ask(way, tokens, sampling=SAMPLING, **changes) for way, tokens in asked]
    got = await asyncio.gather(*(dx.generate(ask) for ask in asks))
    for (way, tokens), (answer, _) in zip(asked, got, strict=True):
        assert answer == (await bench.right(way, tokens))[: len(answer)]
        assert len(answer) == SAMPLING.max_tokens
    for way in WAYS:
        await bench.until_idle(way)
    return [ended for _, ended in got]


@pytest.mark.parametrize(
    ("num_prompts", "length", "waves"),
    [(12, 18, 5), pytest.param(10, 200, 24, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
    ids=["240-small", "960-large"],
)
async def test_no_false_alarm(bench: Bench, num_prompts: int, length: int, waves: int) -> None:
    """Half of the waves with prefill's cache, so that digests are used again; never with decode's."""
    before = {way: bench.counters(way) for way in WAYS}
    asked = [(way, tokens) for tokens in prompts(num_prompts, length) for way in WAYS] * 2
    for number in range(waves):
        cache = {"use_prefix_cache": number % 2 == 1, "decode_may_hit": False}
        for ended in await wave(bench, asked, **cache):
            ledger = ended.ledger
            assert (ledger.decode_computed_prompt_tokens, ledger.transfer.resent_pages) == (0, 0)
            assert ledger.transfer.pages == -(-length // PAGE)
    assert not [m for m in bench.relay.log if isinstance(m, Nack)]
    for way in WAYS:
        for old, new in zip(before[way], bench.counters(way), strict=True):
            assert {name: new[name] - old[name] for name in ALARMS} == dict.fromkeys(ALARMS, 0)
