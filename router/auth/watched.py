"""A file that is read again when it changes; while it can not be used, what was read before stays in force.

As certificates are (`pdserve.tls.source`): the file system is asked at each use, nothing is watched.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_FILE_BYTES = 16 << 20
RETRY_S = 10.0
"""A file that could not be used is tried again after this, changed or not: a folder may have been opened."""
_Signature = tuple[int, int, int, int]


class WatchedFile(Generic[T]):
    """What a file says, parsed. One event loop's."""

    def __init__(
        self,
        name: str,
        path: str,
        parse: Callable[[bytes], T],
        *,
        private: bool,
        on_change: Callable[[T, T], None] = lambda old, new: None,
    ) -> None:
        """name: the setting, for messages. parse: raises ConfigError. private: others may not even read it.
        on_change: told what it said and says now.

        Raises ConfigError for a file that can not be used.
        """
        self._name, self._path, self._parse, self._private = name, Path(path), parse, private
        self._on_change = on_change
        self._seen = self._signature()
        self._value = self._read()
        self._failed_at: float | None = None

    def current(self) -> T:
        """What the file says; what it said, while it can not be used."""
        seen = self._signature()
        if seen != self._seen or self._retry_due():
            self._seen = seen
            self._reload()
        return self._value

    def _retry_due(self) -> bool:
        return self._failed_at is not None and time.monotonic() - self._failed_at >= RETRY_S

    def _reload(self) -> None:
        old = self._value
        try:
            self._value = self._read()
        except ConfigError as error:
            self._failed_at = time.monotonic()
            log.warning("a changed file is not used yet, what it said before stays: %s", error.message)
            return
        self._failed_at = None
        log.info("%s was read again", self._name)
        self._on_change(old, self._value)

    def _signature(self) -> _Signature | None:
        try:
            info = self._path.stat()
        except OSError:
            return None
        return (info.st_mtime_ns, info.st_size, info.st_ino, info.st_mode)

    def _read(self) -> T:
        return self._parse(read_guarded(self._name, self._path, private=self._private))


def read_guarded(name: str, path: Path, *, private: bool) -> bytes:
    """A file that only we or root can change and, if private, only its owner can read.

    Raises ConfigError naming the setting. One descriptor is checked and read, so that nobody swaps the file
    in between.
    """
    try:
        with path.open("rb") as file:
            _check_owner(name, os.fstat(file.fileno()), private=private)
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        raise ConfigError(f"{name}: there is no such file, or it can not be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{name}: the file is larger than {MAX_FILE_BYTES >> 20} MiB")
    return content


def _check_owner(name: str, info: os.stat_result, *, private: bool) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{name}: is not a plain file")
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{name}: the file belongs to somebody else; it must be ours or root's")
    # Root may let a group read it: so Kubernetes mounts secrets.
    shared_by_root = info.st_uid == 0 and os.geteuid() != 0
    forbidden = stat.S_IRWXG | stat.S_IRWXO if private else stat.S_IWGRP | stat.S_IWOTH
    if info.st_mode & forbidden & ~(stat.S_IRGRP if shared_by_root else 0):
        doing = "read or change" if private else "change"
        raise ConfigError(f"{name}: others can {doing} the file; make it private with chmod 600")
