"""Progress lines of a start-up: what is going on, since when, and where the time went."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

TICK_S = 5.0
"""A phase that is silent for this long says that it goes on."""


class Phases:
    """Prints a line when a phase begins, when something happens in it, and when it is done."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._spoke = self._start
        self._took: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str, doing: str) -> Iterator[None]:
        """One step of the start; its seconds are kept for the summary."""
        began = time.monotonic()
        self.say(f"{name}: {doing}")
        yield
        took = time.monotonic() - began
        self._took.append((name, took))
        self.say(f"{name}: done in {took:.1f} s")

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self._spoke = time.monotonic()
        print(f"[{self._spoke - self._start:6.1f} s] {text}", flush=True)

    def tick(self, text: str) -> None:
        """Says it only after a silence."""
        if time.monotonic() - self._spoke >= TICK_S:
            self.say(text)

    def summary(self) -> str:
        """Total seconds, and those of each phase."""
        parts = ", ".join(f"{name} {took:.1f}" for name, took in self._took)
        return f"{time.monotonic() - self._start:.1f} s ({parts})"


def warn(text: str) -> None:
    """A line on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
