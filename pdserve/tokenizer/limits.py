"""What one chat template render may use, and the meter that ends it. Pure counting; no Jinja here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2.utils import Namespace

MAX_MESSAGES = 1024
MAX_INPUT_CHARS = 4 << 20
"""Characters of all messages of one conversation."""
MAX_TEXT_CHARS = 8 << 20
"""Characters of one text within a render, the result included."""
MAX_TOTAL_CHARS = 128 << 20
"""Characters of all texts made in one render."""
MAX_NODES = 100_000
"""Values in one list or mapping, counted as often as they appear in it."""
MAX_DEPTH = 80
"""Of values: schemas of 64 levels, within the lists and mappings of tools and messages."""
MAX_STEPS = 2_000_000
MAX_INT_BITS = 4096
MAX_CPU_S = 2.0
"""CPU seconds of the rendering thread."""


class RenderLimit(Exception):
    """A render used more than it may. Caught by `templates` and turned into InvalidRequest."""


@dataclass(slots=True)
class Meter:
    """Counts what one render uses. Every loop step, call and operator passes here, and every single operation
    between two passes is bounded by the sizes checked here; so the sum is bounded too."""

    cpu_s: float = MAX_CPU_S
    steps: int = 0
    chars: int = 0
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.thread_time() + self.cpu_s

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS or time.thread_time() > self._end:
            raise RenderLimit("it takes too long")

    def made(self, value: Any) -> Any:
        """Passes a new value through, if it is within limits."""
        self.step()
        if isinstance(value, str):
            need_chars(len(value))
            self.chars += len(value)
            if self.chars > MAX_TOTAL_CHARS:
                raise RenderLimit("it makes too much text")
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise RenderLimit("a number is too large")
        elif isinstance(value, Namespace):
            measure(_attributes(value))
        elif isinstance(value, (list, tuple, dict)):
            measure(value)
        return value

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values one by one, each counted as a step."""
        for value in values:
            self.step()
            yield value


_METER: ContextVar[Meter] = ContextVar("pdserve_template_meter")


def meter() -> Meter:
    """The meter of the render that runs in this context."""
    return _METER.get()


@contextmanager
def metered(cpu_s: float = MAX_CPU_S) -> Iterator[Meter]:
    """Runs one render under a fresh meter."""
    fresh = Meter(cpu_s)
    token = _METER.set(fresh)
    try:
        yield fresh
    finally:
        _METER.reset(token)


def need_chars(count: int) -> None:
    """Refuses to make a text of `count` characters if that is too many."""
    if count > MAX_TEXT_CHARS:
        raise RenderLimit("a text is too long")


def measure(value: Any) -> None:
    """Refuses a list or mapping that is too large or too deep when written out in full.

    Values that appear several times count each time: otherwise forty nested pairs would be a trillion values.
    A namespace can still change, so none may be within.
    """
    nodes = chars = 0
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        nodes += 1
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, Namespace):
            raise RenderLimit("a namespace is put into another value")
        elif (inner := _inner(item)) is not None:
            if depth >= MAX_DEPTH:
                raise RenderLimit("a value is nested too deeply")
            nodes += len(inner)
            if nodes > MAX_NODES:
                raise RenderLimit("a list is too long")
            todo.extend((part, depth + 1) for part in inner)
    if nodes > 2 * MAX_NODES or chars > MAX_TEXT_CHARS:
        raise RenderLimit("a list is too long")


def _inner(item: Any) -> list[Any] | None:
    if isinstance(item, (list, tuple)):
        return list(item)
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    return None


def _attributes(namespace: Namespace) -> Any:
    return object.__getattribute__(namespace, "_Namespace__attrs")
