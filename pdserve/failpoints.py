"""Faults that tests ask for at named places of the product: a stall, flipped bytes, a clock that is wrong.

They come from the environment and work only where PDSERVE_TESTING=1 says that this is a test; a process
that is asked for one anywhere else refuses to start (`require_allowed`). Off, `hit` is one comparison. What
lives here: the closed list of names and the parsing. What does not: what a fault does at its place.

PDSERVE_FAILPOINTS holds `name=kind:value*times` separated by ";": times is how often it fires, for ever if
left out, and the value of a stall is seconds. "@file" reads the same text from a file, again at each hit, so
that a test changes the faults of running processes (write it beside and rename); a changed text starts
counting anew.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pdserve.errors import ConfigError

VARIABLE, TESTING = "PDSERVE_FAILPOINTS", "PDSERVE_TESTING"
NAMES = frozenset(
    {
        # The phases of the latency ledger, where each spends its time.
        *("tokenise", "queue", "dispatch", "prefill_queue", "compute", "announce", "wire", "verify", "admit"),
        *("first_step", "return"),
        # The monotonic clock of this process: seconds that it is off, and by what share it runs fast.
        *("clock_offset", "clock_rate"),
        "rank_silence",  # seconds after which a silent rank is lost, for machines that a test overloads
    }
)
"""Every failpoint there is. Adding one: a name here, a `hit` at its place, a test that uses it."""


class Kind(StrEnum):
    """What a fault is; each place knows the kinds it can do."""

    STALL = "stall"
    CORRUPT = "corrupt"
    SET = "set"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Action:
    """One fault. value: seconds of a stall, a byte's place for corrupt, the number for set."""

    kind: Kind
    value: float = 0.0


_ENTRY = re.compile(
    rf"(?P<name>\w+)=(?P<kind>{'|'.join(Kind)})"
    r"(:(?P<value>[-+]?[0-9.]+(e[-+]?[0-9]+)?))?(\*(?P<times>\d+))?"
)


class Failpoints:
    """The faults of one process. Any thread may call `hit`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ConfigError for a text that is none, or for any text outside of tests."""
        text = environ.get(VARIABLE, "")
        if text and environ.get(TESTING) != "1":
            raise ConfigError(f"{VARIABLE} is set: faults are for tests; unset it, or set {TESTING}=1")
        self._file = Path(text[1:]) if text.startswith("@") else None
        self._lock = threading.Lock()
        self._text: str | None = None
        self._left: dict[str, tuple[Action, int | None]] = {}
        self.on = bool(text)
        self._load("" if self._file else text)

    def hit(self, name: str) -> Action | None:
        """The fault that is to happen at this place now, or None. Counts as one time."""
        if not self.on:
            return None
        with self._lock:
            if self._file is not None:
                self._load(self._file.read_text("utf-8") if self._file.exists() else "")
            action, times = self._left.get(name, (None, None))
            if action is None or times == 0:
                return None
            if times is not None:
                self._left[name] = (action, times - 1)
            return action

    def _load(self, text: str) -> None:
        if text != self._text:
            self._left = parse(text)
            self._text = text


def parse(text: str) -> dict[str, tuple[Action, int | None]]:
    """Faults by name, with how often each fires (None: always). Raises ConfigError naming what is wrong."""
    found: dict[str, tuple[Action, int | None]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(entry)
        if match is None or match["name"] not in NAMES:
            raise ConfigError(f"{VARIABLE}: {entry!r} is no failpoint; write name=kind:value*times")
        times = None if match["times"] is None else int(match["times"])
        found[match["name"]] = (Action(Kind(match["kind"]), float(match["value"] or 0.0)), times)
    return found


_state: Failpoints | None = None


def require_allowed(environ: Mapping[str, str] = os.environ) -> None:
    """Every process of ours calls it first. Raises ConfigError where faults are asked for outside tests."""
    global _state
    _state = Failpoints(environ)


def hit(name: str) -> Action | None:
    """The fault of this process that is to happen here now; None without any, and before require_allowed."""
    return _state.hit(name) if _state is not None and _state.on else None


def armed() -> bool:
    """Whether this process may be asked for a fault: then code that knows no failpoints stands aside."""
    return _state is not None and _state.on


def stall_s(name: str) -> float:
    """Seconds to wait here, 0 almost always. For event loops: the place itself waits."""
    action = hit(name)
    return action.value if action is not None and action.kind is Kind.STALL else 0.0


def stall(name: str) -> None:
    """Waits here if so asked. For threads that may block."""
    seconds = stall_s(name)
    if seconds:
        time.sleep(seconds)


def setting(name: str) -> float:
    """The number that a `set` fault gives, else 0."""
    action = hit(name)
    return action.value if action is not None and action.kind is Kind.SET else 0.0
