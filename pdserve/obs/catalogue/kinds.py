"""What a declared metric is, the labels several share, and buckets of histograms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pdserve.types import AGE_LIMITS_S, Role, UsedState


class Kind(StrEnum):
    """Prometheus' kinds that we use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and all values it can have. No values: it has one, fixed when the process starts."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric.

    name: as it is asked for; a counter's ends in `_total`, a histogram's series add `_bucket`, `_sum` and
    `_count`. help: one sentence. labels: every combination exists from the start. buckets: upper bounds, of
    histograms.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is Kind.COUNTER and not self.name.endswith("_total"):
            raise ValueError(f"{self.name}: a counter's name ends in _total")
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"{self.name}: histograms, and only they, have buckets")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels in order."""
        return tuple(label.name for label in self.labels)

    def combinations(self) -> Iterator[dict[str, str]]:
        """All label sets this metric has; none if a label's value is fixed at start."""
        for values in itertools.product(*(label.values for label in self.labels)):
            yield dict(zip(self.label_names, values, strict=True))


def counter(name: str, help_text: str, *labels: Label) -> Metric:
    """A counter; the name without `_total`."""
    return Metric(name=f"{name}_total", kind=Kind.COUNTER, help=help_text, labels=labels)


def gauge(name: str, help_text: str, *labels: Label) -> Metric:
    """A gauge."""
    return Metric(name=name, kind=Kind.GAUGE, help=help_text, labels=labels)


def histogram(name: str, help_text: str, *labels: Label, buckets: tuple[float, ...]) -> Metric:
    """A histogram with these upper bounds; infinity is added."""
    return Metric(name=name, kind=Kind.HISTOGRAM, help=help_text, labels=labels, buckets=buckets)


ROLE = Label("role", tuple(str(role) for role in Role))
PAGE_STATES = ("free", "evictable", "reserved", "filling", "sealed", "retiring", "quarantined")
PAGE_STATE = Label("state", PAGE_STATES)
USED_STATE = Label("state", tuple(str(state) for state in UsedState))
AGES = (*(f"<{limit:g}s" for limit in AGE_LIMITS_S), "older")
AGE = Label("age", AGES)
OTHER = "other"
"""Where a label's value is not in its closed set: what we did not foresee, never what a caller wrote."""

REQUEST_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0
)  # fmt: skip
"""Seconds: parts of a request up to all of it. 2 s is the usual target of TTFT."""
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.16, 0.32, 0.64, 1.28, 2.56)
"""Seconds: between two tokens, one step. 0.1 s is the usual target."""
SHORT_SECONDS = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1.0)
"""Seconds: what should not be noticed."""
PHASE_SECONDS = (
    0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0,
)  # fmt: skip
"""Seconds: phases, from a message's way to a long prompt."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Sequences or rows of a step."""
TOKEN_COUNTS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000
)  # fmt: skip
"""Tokens of a prompt or an answer."""
