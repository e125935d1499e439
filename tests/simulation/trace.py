"""The readable event trace of a run: who, what, when, which key."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

from pdserve.types import Key, PageName

LONGEST = 160
SHOWN = 400
_HIDDEN = frozenset({"key", "ticket", "token_ids", "ledger", "usage", "sampling", "digest", "content_key"})


class Trace:
    """Lines are kept as objects and formatted only when somebody reads them."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str, str, tuple[object, ...]]] = []

    def add(self, now: float, who: str, what: str, about: tuple[object, ...]) -> None:
        self._lines.append((now, who, what, about))

    def lines(self, last: int | None = None) -> list[str]:
        """The lines, or the last ones."""
        chosen = self._lines if last is None else self._lines[-last:]
        return [
            f"{now:10.4f} {who:12} {what} {' '.join(map(_short, about))}".rstrip()
            for now, who, what, about in chosen
        ]

    def text(self, last: int | None = SHOWN, about: str = "") -> str:
        """All of it, or the last lines, and before those whatever is about one request."""
        if last is None:
            return "\n".join(self.lines())
        lines = self.lines()
        mentions = re.compile(rf"\b{about}\b|fault|starts as|is stopped|goes on|dies")
        early = [line for line in lines[:-last] if about and mentions.search(line)]
        return "\n".join([*early, "...", *lines[-last:]])


def _short(thing: object) -> str:
    """A message as its name, key and what differs from the default, short."""
    if isinstance(thing, Key | str | int | float | None):
        return str(thing)
    if isinstance(thing, PageName):
        return f"page {thing.page} generation {thing.generation}"
    if not is_dataclass(thing):
        return str(thing)[:LONGEST]
    key = getattr(thing, "key", None)
    said = [
        f"{f.name}={_short(getattr(thing, f.name))}"
        for f in fields(thing)
        if f.name not in _HIDDEN and getattr(thing, f.name) not in ((), "", None, 0)
    ]
    name = type(thing).__name__
    return f"{name} {key if key is not None else ''} {' '.join(said)}"[:LONGEST].strip()
