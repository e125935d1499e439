"""TLS with a server that wants no certificate of us: the authorities we trust, read again when they change.

What lives here: the client's end of plain TLS. What does not: certificates of our own (`source`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass

from pdserve.errors import ConfigError

_BEGIN = b"-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """What a channel needs; there is no certificate of ours."""

    ca: bytes
    cert: bytes | None = None
    key: bytes | None = None


class Authorities:
    """The authorities of one file. Any thread may use it."""

    def __init__(self, path: str, server_name: str = "") -> None:
        """path: PEM. server_name: checked in place of the host that is dialled. Raises ConfigError."""
        self._path, self._server_name = path, server_name
        self._lock = threading.Lock()
        self._seen, self._trusted = self._load()
        self._version = 1

    def current(self) -> Trusted:
        """The newest that could be read."""
        return self.versioned()[1]

    def versioned(self) -> tuple[int, Trusted]:
        """The same with its number, which grows with each change."""
        with self._lock, contextlib.suppress(ConfigError):
            if self._signature() != self._seen:
                self._seen, self._trusted = self._load()
                self._version += 1
        return self._version, self._trusted

    def name_of(self, host: str) -> str:
        """What a certificate must cover to be taken for the one of `host`."""
        return self._server_name or host.strip("[]")

    def _signature(self) -> tuple[int, int, int]:
        try:
            info = os.stat(self._path)
        except (OSError, ValueError):
            raise ConfigError("tls_ca: there is no such file, or it can not be reached") from None
        return info.st_mtime_ns, info.st_size, info.st_ino

    def _load(self) -> tuple[tuple[int, int, int], Trusted]:
        seen = self._signature()
        try:
            with open(self._path, "rb") as file:
                ca = file.read()
        except OSError:
            raise ConfigError("tls_ca: the file can not be read") from None
        if _BEGIN not in ca:
            raise ConfigError("tls_ca: holds no certificate in PEM")
        return seen, Trusted(ca=ca)
