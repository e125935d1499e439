"""Disaggregated equals aggregated, token for token, over the handover's configurations.

{1P1D, 2P2D} x {shm, tcp} x {page 16, 32} x {chunk 64, 512} x {with, without forced preemption} x {pages of
float32, int8}, and in each of them {cold, prefix hit on P, prefix hit on D}. `make test` runs a subset in
which every two settings meet; `make test-full` all of them. Each run's ledger shows that the handover took
place (conventions.md, Tests).
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from fractions import Fraction

import pytest

from pdserve.messages import Ended
from pdserve.types import HandoverMode, SamplingParams
from tests.support import direct as dx

NEW_TOKENS = 100
MORE_TOKENS = 160
"""With preemption: more growth than the floor has room for."""
FLOOR = Fraction(1, 4)
"""Share of a decode worker's pool that reservations leave to prompts of its own."""
GROWTH = 64
PREEMPTED = 5
SHORT = 40


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration of the fleet."""

    pairs: int
    transport: str
    page_size: int
    chunk: int
    preempt: bool
    pages: str

    @property
    def page_bytes(self) -> int:
        """Of 30 layers' K and V of 3 heads of 64 numbers; in int8 with a scale by token and head."""
        row = {"float32": 64 * 4, "int8": 64 + 4}[self.pages]
        return 30 * 2 * 3 * self.page_size * row

    @property
    def num_pages(self) -> int:
        """With preemption: what so many requests reserve beside the floor; their growth does not fit."""
        reserved = PREEMPTED * -(-(SHORT + GROWTH) // self.page_size)
        return -(-reserved // (1 - FLOOR)) if self.preempt else 2048 // self.page_size

    def __str__(self) -> str:
        kind = "preempt" if self.preempt else "room"
        return (
            f"{self.pairs}P{self.pairs}D-{self.transport}-p{self.page_size}-c{self.chunk}-{kind}-{self.pages}"
        )


ALL = [
    Cell(*values)
    for values in itertools.product(
        (1, 2), ("shm", "tcp"), (16, 32), (64, 512), (False, True), ("float32", "int8")
    )
]


def meetings(cell: Cell) -> set[tuple[int, object, int, object]]:
    """Pairs of settings that this cell shows together."""
    values = (cell.pairs, cell.transport, cell.page_size, cell.chunk, cell.preempt, cell.pages)
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def pairwise() -> list[Cell]:
    """A small set of cells in which every pair of settings meets; greedy, always the same."""
    missing = set().union(*map(meetings, ALL))
    chosen: list[Cell] = []
    while missing:
        best = max(ALL, key=lambda cell: (len(meetings(cell) & missing), -cell.pairs))
        chosen.append(best)
        missing -= meetings(best)
    return chosen


SUBSET = pairwise()
CELLS = [pytest.param(c, id=str(c), marks=() if c in SUBSET else pytest.mark.full) for c in ALL]

_reference: dict[tuple[str, tuple[int, ...]], list[int]] = {}


def prompts(cell: Cell) -> list[tuple[int, ...]]:
    """Equal lengths for preemption; else short, a few chunks, many chunks."""
    lengths = [SHORT] * PREEMPTED if cell.preempt else [17, 130, 600]
    return [
        tuple(50 + (n * 7919 + i * 104729 + length) % 40000 for i in range(length))
        for n, length in enumerate(lengths)
    ]


async def reference(fleet: dx.Direct, tokens: tuple[int, ...], cell: Cell) -> list[int]:
    """The aggregated answer: computed by one worker alone, no cache; once for all cells with such pages."""
    name = cell.pages, tokens
    if name not in _reference:
        alone = fleet.ask(
            tokens, mode=HandoverMode.LOCAL, use_prefix_cache=False, sampling=sampling(cell.preempt)
        )
        _reference[name], ended = await dx.generate(alone)
        assert ended.ledger.decode_computed_prompt_tokens == len(tokens)
    return _reference[name]


def sampling(preempt: bool) -> SamplingParams:
    return SamplingParams(max_tokens=MORE_TOKENS if preempt else NEW_TOKENS, ignore_eos=True)


async def run(
    fleets: list[dx.Direct], asked: list[tuple[int, ...]], *, p_hits: bool, d_hits: bool, crowd: bool
) -> list[tuple[list[int], Ended]]:
    """All prompts at once, dealt to every combination of workers; crowd: to one decode worker only."""
    decodes = fleets[:1] if crowd else fleets
    combinations = [p if p is d else p.crossed(d) for d in decodes for p in fleets]
    asks = [
        combinations[i % len(combinations)].ask(
            tokens, sampling=sampling(crowd), prefill_may_hit=p_hits, decode_may_hit=d_hits, deadline_s=300.0
        )
        for i, tokens in enumerate(asked)
    ]
    return list(await asyncio.gather(*(dx.generate(ask) for ask in asks)))


def check(cell: Cell, tokens: tuple[int, ...], ended: Ended, hits_on: str) -> None:
    """The ledger must show a handover: nothing of the prompt computed on decode, all lacking pages moved."""
    ledger = ended.ledger
    pages = -(-len(tokens) // cell.page_size)
    usable = (len(tokens) - 1) // cell.page_size
    hits = usable if hits_on == "decode" else 0
    assert ledger.decode_computed_prompt_tokens == 0
    assert ledger.transfer.hit_pages == hits
    assert ledger.transfer.pages == pages - hits
    assert ledger.transfer.path == cell.transport
    assert ledger.transfer.bytes == ledger.transfer.pages * cell.page_bytes
    cached = usable * cell.page_size if hits_on == "prefill" else 0
    assert ledger.prefill_cached_tokens == cached
    assert ledger.prefill_computed_tokens == len(tokens) - cached


@pytest.mark.parametrize("cell", CELLS)
async def test_every_stream_equals_the_aggregated_one(cell: Cell) -> None:
    fleets = await asyncio.to_thread(
        dx.Direct.start_many,
        cell.pairs,
        transports=(cell.transport,),
        page_size=cell.page_size,
        kv_dtype=cell.pages,
        num_pages=cell.num_pages,
        prefill_chunk_tokens=cell.chunk,
        token_budget=2 * cell.chunk,
    )
    try:
        asked = prompts(cell)
        wanted = [await reference(fleets[0], tokens, cell) for tokens in asked]
        # Warm every worker's cache with the same pages first where hits are wanted.
        retractions = 0
        for hits_on in ("nobody", "prefill", "decode"):
            p_hits, d_hits = hits_on == "prefill", hits_on == "decode"
            if hits_on != "nobody" and not cell.preempt:
                await warm(fleets, asked)
            got = await run(fleets, asked, p_hits=p_hits, d_hits=d_hits, crowd=cell.preempt)
            for tokens, want, (answer, ended) in zip(asked, wanted, got, strict=True):
                assert answer == want, f"{hits_on}: not the aggregated answer"
                retractions += ended.ledger.num_retractions
                if not cell.preempt:
                    check(cell, tokens, ended, hits_on)
                else:
                    assert ended.ledger.num_retractions or ended.ledger.decode_computed_prompt_tokens == 0
                    assert ended.ledger.transfer.pages + ended.ledger.transfer.hit_pages >= 1
        assert (retractions > 0) == cell.preempt, "preemption was forced or was not"
        for fleet in fleets:
            await fleet.until_idle()
    finally:
        for fleet in fleets:
            await asyncio.to_thread(fleet.stop)


async def warm(fleets: list[dx.Direct], asked: list[tuple[int, ...]]) -> None:
    """Every prompt into every worker's prefix cache."""
    short = SamplingParams(max_tokens=1)
    for tokens in asked:
        for fleet in fleets:
            await dx.generate(fleet.ask(tokens, sampling=short))


def test_the_subset_covers_every_pair_of_settings() -> None:
    assert set().union(*map(meetings, SUBSET)) == set().union(*map(meetings, ALL))
    assert len(SUBSET) <= 8
