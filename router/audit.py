"""The audit log: who changed the fleet, when, from where, and how it ended. JSON lines in a file, or the log.

What lives here: records and where they go. What does not: which calls are such (`pdserve.rpc.access`). A
record names what was asked for, never what users wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import ConfigError, PdserveError
from router.caller import Caller

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # whatever the level of the rest

ARGUMENTS = ("worker_id",)
"""Fields of requests that may be recorded."""
_NOBODY = Caller(tenant="", key_id="", admin=False)


@dataclass(slots=True)
class Entry:
    """One call as far as it is known. caller: none until it is admitted."""

    action: str
    peer: str = ""
    caller: Caller = _NOBODY
    arguments: dict[str, str] = field(default_factory=dict)

    def told(self, request: Any) -> None:
        """Takes what may be recorded of a request."""
        self.arguments = {name: getattr(request, name) for name in ARGUMENTS if hasattr(request, name)}


class AuditLog:
    """Appends one line for each entry. One event loop's."""

    def __init__(self, path: str = "", *, now: Callable[[], float] = time.time) -> None:
        """path: "" writes to the log. now: seconds since 1970. Raises ConfigError if it can not be."""
        self._path, self._now = path, now
        if path:
            try:
                os.close(self._open())
            except OSError:
                raise ConfigError("audit_log: the file can not be written") from None

    @contextmanager
    def call(self, action: str, peer: str) -> Iterator[Entry]:
        """Around a call: its end is recorded, whatever it is."""
        entry = Entry(action=action, peer=peer)
        outcome = "internal"
        try:
            yield entry
            outcome = "ok"
        except PdserveError as error:
            outcome = error.label
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.write(entry, outcome)

    def write(self, entry: Entry, outcome: str) -> None:
        """Records one entry. outcome: "ok" or an error label."""
        line = json.dumps(
            {
                "time": round(self._now(), 3),
                "action": entry.action,
                "key_id": entry.caller.key_id,
                "tenant": entry.caller.tenant,
                "peer": entry.peer,
                "arguments": entry.arguments,
                "outcome": outcome,
            }
        )
        if not self._path:
            log.info("audit %s", line)
            return
        try:
            descriptor = self._open()
            with os.fdopen(descriptor, "w") as file:
                file.write(line + "\n")
        except OSError:
            log.error("audit_log can not be written; the record follows: %s", line)

    def keys_changed(self, added: frozenset[str], removed: frozenset[str]) -> None:
        """The file of API keys has others now."""
        ids = {"added": " ".join(sorted(added)), "removed": " ".join(sorted(removed))}
        self.write(Entry(action="keys", arguments=ids), "ok")

    def _open(self) -> int:
        """Opened for each line, so that the file may be moved away at any time."""
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
