"""When the router of `pdserve up` is started again: at once after a good time, later each time it fails."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.cli.router_child import RouterChild
from pdserve.cli.router_keeper import FIRST_BACKOFF_S, HEALTHY_AFTER_S, RouterKeeper
from pdserve.errors import Unavailable

SLOW_START_S = HEALTHY_AFTER_S + 1.0


class Starts:
    """Starts of routers on a clock that each of them moves: the first serves and ends, later ones fail."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: list[float] = []
        self.process = subprocess.Popen([sys.executable, "-c", ""])

    def __call__(self, *ports: int | None) -> RouterChild:
        self.at.append(self.now)
        if len(self.at) == 1:
            return RouterChild(self.process, "127.0.0.1:50051", 0)
        self.now += SLOW_START_S
        raise Unavailable("the router did not listen in time")


@pytest.fixture
def starts() -> Iterator[Starts]:
    made = Starts()
    yield made
    made.process.wait()


def test_a_router_that_takes_long_to_fail_at_its_start_is_not_taken_for_one_that_served(
    starts: Starts,
) -> None:
    keeper = RouterKeeper(starts, say=lambda text: None, clock=lambda: starts.now)
    starts.process.wait()
    starts.now += HEALTHY_AFTER_S
    for _ in range(200):
        keeper.watch()
        starts.now += 0.5
    pauses = [
        later - earlier - SLOW_START_S for earlier, later in zip(starts.at[1:], starts.at[2:], strict=False)
    ]
    assert starts.at[1] == HEALTHY_AFTER_S  # at once: the first one had served for long
    assert pauses[1] >= FIRST_BACKOFF_S
    assert pauses[3] > pauses[2] > pauses[1]


def test_a_router_for_which_no_descriptor_is_left_is_an_error_that_the_keeper_knows() -> None:
    before = set(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(3):
        held = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 16, hard))
            held = _all_descriptors()
            for _ in range(spare):
                os.close(held.pop())
            with pytest.raises(Unavailable):
                RouterChild.start([], "00" * 32)
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not set(os.listdir("/proc/self/fd")) - before


def _all_descriptors() -> list[int]:
    held: list[int] = []
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return held
