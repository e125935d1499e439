"""What all tests share: one hypothesis profile, memory given back, where time and memory went."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support import memory

# Two shared cores: a slow draw says nothing about the strategy, and timings are no test's business.
settings.register_profile(
    "pdserve", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, database=None
)
settings.load_profile("pdserve")

GROUPS = (
    ("oracle", ("conformance/test_oracle",)),
    ("unit", ("tests/unit", "tests/rules")),
    ("conformance", ("tests/conformance",)),
    ("simulation", ("tests/simulation",)),
    ("handover matrix", ("handover", "matrix", "disagg", "conditional")),
    ("faults", ("fault", "cancel", "deadline", "vanish", "kill", "fleet", "integrity")),
)
"""Group of a test by parts of its path; the first that fits wins, the rest is "edge"."""

_seconds: defaultdict[str, float] = defaultdict(float)
_counts: defaultdict[str, int] = defaultdict(int)
_least_available: tuple[int, str] = (1 << 62, "")


@pytest.fixture(autouse=True, scope="module")
def memory_given_back() -> Iterator[None]:
    """After the last test of a module, and after all its other fixtures."""
    yield
    memory.give_back_if_large()


def pytest_collection_finish() -> None:
    """Ray keeps the switches it finds when it is first imported: a test file must not do that by itself."""
    if "ray" in sys.modules:
        raise pytest.UsageError("a test imports ray before its environment is set; see pdserve.fleet.cluster")


def group_of(node_id: str) -> str:
    """The group a test's time is counted under."""
    path = node_id.partition("::")[0]
    return next((name for name, parts in GROUPS if any(part in path for part in parts)), "edge")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    group = group_of(report.nodeid)
    _seconds[group] += report.duration
    _counts[group] += report.when == "call"
    if os.environ.get("PDSERVE_TEST_REPORT"):
        global _least_available
        _least_available = min(_least_available, (memory.available_bytes(), report.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get("PDSERVE_TEST_REPORT"):
        return
    terminalreporter.write_sep("-", "time spent by group")
    for group in (*(name for name, _ in GROUPS), "edge"):
        terminalreporter.write_line(f"{group:<18}{_seconds[group]:8.1f} s {_counts[group]:6d} tests")
    least, where = _least_available
    terminalreporter.write_line(f"memory: at least {least / 2**30:.1f} GiB were available, after {where}")
    terminalreporter.write_line(
        f"{'sum':<18}{sum(_seconds.values()):8.1f} s {sum(_counts.values()):6d} tests"
    )
