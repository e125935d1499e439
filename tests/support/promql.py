"""Reading our own PromQL: which series a query asks for, checked against the catalogue of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.obs.catalogue import BY_NAME, Kind

_SELECTOR = re.compile(r"\b((?:pdserve|process)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Selector:
    """One selector of a query. matchers: (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expr: str) -> Iterator[Selector]:
    """Selectors of our metrics in a query."""
    for name, inside in _SELECTOR.findall(expr):
        yield Selector(name, tuple(_MATCHER.findall(inside)))


def faults(selector: Selector) -> list[str]:
    """What the catalogue does not know: the metric, a label, or a value that the label never has."""
    name, suffix = selector.name, ""
    if name not in BY_NAME:
        name, _, suffix = selector.name.rpartition("_")
    metric = BY_NAME.get(name)
    if metric is None or (suffix != "") != (metric.kind is Kind.HISTOGRAM):
        return [f"{selector.name} is no series"]
    if suffix not in ("", "bucket", "sum", "count"):
        return [f"{selector.name} is no series of a histogram"]
    values = {label.name: frozenset(label.values) for label in metric.labels}
    found = []
    for label, operator, text in selector.matchers:
        if label not in values:
            found.append(f"{selector.name} has no label {label}")
            continue
        asked = text.split("|") if operator in ("=~", "!~") else [text]
        found += [
            f"{selector.name}: {label} is never {value}" for value in asked if value not in values[label]
        ]
    return found
