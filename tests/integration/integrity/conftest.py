"""One set of worker processes for all integrity tests; no fault outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.integrity import WAYS, Bench


@pytest.fixture(scope="package")
def processes() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stop()


@pytest.fixture
def bench(processes: Bench) -> Iterator[Bench]:
    processes.reset()
    yield processes
    errors, processes.relay.errors = processes.relay.errors, []
    processes.reset()
    assert not errors, "a hook of this test failed"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)
