"""What all tests share: one hypothesis profile, and the report of where the time of a run went."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

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


def group_of(node_id: str) -> str:
    """The group a test's time is counted under."""
    path = node_id.partition("::")[0]
    return next((name for name, parts in GROUPS if any(part in path for part in parts)), "edge")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    group = group_of(report.nodeid)
    _seconds[group] += report.duration
    _counts[group] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get("PDSERVE_TEST_REPORT"):
        return
    terminalreporter.write_sep("-", "time spent by group")
    for group in (*(name for name, _ in GROUPS), "edge"):
        terminalreporter.write_line(f"{group:<18}{_seconds[group]:8.1f} s {_counts[group]:6d} tests")
    terminalreporter.write_line(
        f"{'sum':<18}{sum(_seconds.values()):8.1f} s {sum(_counts.values()):6d} tests"
    )
