"""Beats between a leader and its ranks: who counts as lost, and from when on."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.ranks.beats import BEAT_S, SILENT_S, Beats

SOON_S = 30.0
LONG_S = 2.0
"""Silence that a process with much else to do does not fall into."""
Pair = tuple[Beats, Beats, "queue.Queue[tuple[str, str]]"]


@contextmanager
def pair(silent_s: float = 0.3) -> Iterator[Pair]:
    """A leader and rank 1 in this process, and what either says of a loss."""
    leader_end, rank_end = socket.socketpair()
    lost: queue.Queue[tuple[str, str]] = queue.Queue()
    leader = Beats({1: leader_end}, lambda why: lost.put(("leader", why)), silent_s=silent_s)
    rank = Beats({0: rank_end}, lambda why: lost.put(("rank", why)), silent_s=silent_s)
    try:
        yield leader, rank, lost
    finally:
        leader.close()
        rank.close()


def test_two_that_live_lose_nobody() -> None:
    with pair(LONG_S) as (leader, rank, lost):
        leader.start()
        rank.start()
        leader.arm()
        with pytest.raises(queue.Empty):
            lost.get(timeout=1.2 * LONG_S)


def test_silence_is_noticed_within_a_second() -> None:
    """The last beat before it, the silence, and the turn of the thread that looks."""
    assert BEAT_S + SILENT_S + BEAT_S < 1.0


def test_a_closed_connection_counts_at_once_even_before_arming() -> None:
    with pair(silent_s=60.0) as (leader, rank, lost):
        leader.start()
        rank.close()
        assert lost.get(timeout=SOON_S) == ("leader", "rank 1 ended")


def test_silence_counts_only_when_armed() -> None:
    with pair() as (leader, _, lost):
        leader.start()  # rank 1 says nothing
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.8)
        armed = time.monotonic()
        leader.arm()
        assert lost.get(timeout=SOON_S) == ("leader", "rank 1 has been silent for 0.3 s")
        assert time.monotonic() - armed >= 0.3


def test_arming_reaches_the_peer() -> None:
    with pair(LONG_S) as (leader, rank, lost):
        leader.start()
        rank.start()
        leader.arm()
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.5)  # beats cross meanwhile
        leader._say = lambda: None  # type: ignore[method-assign]  # it lives, but says nothing any more
        assert lost.get(timeout=SOON_S) == ("rank", "rank 0 has been silent for 2 s")


def test_closing_is_no_loss() -> None:
    with pair() as (leader, _, lost):
        leader.start()
        leader.arm()
        leader.close()
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.3)
