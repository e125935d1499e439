"""An expert's way over the ferry: what arrives, and its sum against the formula in Python's integers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.ranks.ferry import Ferry, Ferryman, Job, make_ferry

LANE, SLICE = 8192, 256
FACTOR, MODULUS, LANES = 0x9E3779B97F4A7C15, 1 << 64, 8
PATIENCE_S = 60.0
Block = np.ndarray[tuple[int], np.dtype[np.uint8]]


@pytest.fixture(scope="module")
def ferryman() -> Iterator[Ferryman]:
    found = Ferryman(SLICE, 0.0)
    yield found
    found.close()


@pytest.fixture(scope="module")
def ferry() -> Ferry:
    fd = make_ferry(2 * LANE)
    try:
        return Ferry(fd, LANE)
    finally:
        os.close(fd)


def carried(
    ferryman: Ferryman, ferry: Ferry, pieces: list[Block], *, out: bool, stop: bool = False
) -> int | None:
    ended = threading.Event()
    sums: list[int | None] = []

    def done(checksum: int | None) -> None:
        sums.append(checksum)
        ended.set()

    parts = [(piece.ctypes.data, piece.nbytes) for piece in pieces]
    job = Job(pieces=parts, lane=ferry.lane(1), out=out, keep=pieces, done=done)
    if stop:
        job.given_up.set()
    ferryman.add(job)
    assert ended.wait(PATIENCE_S)
    return sums[0]


def formula(pieces: list[bytes]) -> int:
    """Eight lanes of little-endian words, h = h * factor + word in each, then the same over the lanes."""
    lanes = [0] * LANES
    for piece in pieces:
        whole = piece + bytes(-len(piece) % (8 * LANES))
        for at, word in enumerate(np.frombuffer(whole, "<u8").tolist()):
            lanes[at % LANES] = (lanes[at % LANES] * FACTOR + word) % MODULUS
    total = 0
    for lane in lanes:
        total = (total * FACTOR + lane) % MODULUS
    return total


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=2), seed=st.integers(0, 99))
def test_the_bytes_and_their_sum_arrive(
    ferryman: Ferryman, ferry: Ferry, sizes: list[int], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    source = [chance.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    target = [np.zeros_like(piece) for piece in source]
    went = carried(ferryman, ferry, source, out=True)
    came = carried(ferryman, ferry, target, out=False)
    assert all(np.array_equal(one, other) for one, other in zip(source, target, strict=True))
    assert went == came == formula([piece.tobytes() for piece in source])


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 2999), bit=st.integers(0, 7))
def test_any_bit_changes_the_sum(ferryman: Ferryman, ferry: Ferry, at: int, bit: int) -> None:
    source = [np.arange(3000, dtype=np.uint8)]
    before = carried(ferryman, ferry, source, out=True)
    source[0][at] ^= 1 << bit
    assert carried(ferryman, ferry, source, out=True) != before


def test_a_way_that_is_given_up_has_no_sum(ferryman: Ferryman, ferry: Ferry) -> None:
    source, target = [np.full(4 * SLICE, 7, np.uint8)], [np.zeros(4 * SLICE, np.uint8)]
    assert carried(ferryman, ferry, source, out=True) is not None
    assert carried(ferryman, ferry, target, out=False, stop=True) is None
    assert not target[0][SLICE:].any()
