"""Certificates that are replaced while we run: the newest files that can be used, whenever somebody asks.

What lives here: noticing changed files and keeping the old identity while new files do not fit. What does
not: what is made of an identity (TLS sockets, gRPC credentials).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from pdserve.errors import ConfigError
from pdserve.tls.contexts import Identity, load
from pdserve.tls.files import Signature, TlsFiles

log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Files that could not be used are tried again after this, changed or not (a clock may have to catch up)."""
_TRIES = 3


class TlsSource:
    """The identity of this process. Any thread may use it."""

    def __init__(self, files: TlsFiles, *, serves: bool = True) -> None:
        """serves: the certificate must do for a server. Raises ConfigError with a sentence."""
        self.files, self._serves = files, serves
        self._lock = threading.Lock()
        self._seen, self._identity = self._load()
        self._failed_at: float | None = None
        self._version = 1

    def current(self) -> Identity:
        """The newest identity; asks the file system, and reads again only what has changed."""
        return self.versioned()[1]

    def versioned(self) -> tuple[int, Identity]:
        """The same with its number, which grows with each new identity."""
        with self._lock:
            if self._changed():
                self._reload()
            return self._version, self._identity

    def name_of(self, host: str) -> str:
        """What a certificate must cover to be taken for the one of `host`."""
        return self.files.server_name or host.strip("[]")

    def check_serves(self, host: str) -> None:
        """Raises ConfigError if those who dial `host` would not take our certificate for it."""
        name = self.name_of(host)
        if not covers(self.current().names, name):
            raise ConfigError(
                f"tls_cert: the certificate does not cover {name}; issue another, or set tls_server_name"
            )

    def _changed(self) -> bool:
        if self._failed_at is not None and time.monotonic() - self._failed_at >= RETRY_S:
            return True
        with contextlib.suppress(ConfigError):
            return self.files.signature() != self._seen
        return False  # a file is being replaced just now

    def _reload(self) -> None:
        try:
            self._seen, self._identity = self._load()
        except ConfigError as error:
            with contextlib.suppress(ConfigError):
                self._seen = self.files.signature()
            self._failed_at = time.monotonic()
            log.warning("changed TLS files are not used yet: %s", error.message)
            return
        self._failed_at = None
        self._version += 1
        log.info("TLS files were read again")

    def _load(self) -> tuple[Signature, Identity]:
        """The files as they were at one moment, not half replaced."""
        for _ in range(_TRIES):
            before = self.files.signature()
            identity = load(self.files, serves=self._serves)
            if self.files.signature() == before:
                return before, identity
        raise ConfigError("tls_cert, tls_key: the files keep changing while they are read")


def covers(names: tuple[str, ...], host: str) -> bool:
    """Whether one of a certificate's names is this host; a wildcard stands for one label."""
    wanted = host.lower().rstrip(".")
    tail = wanted.partition(".")[2]
    return any(
        name.lower() == wanted or (name.startswith("*.") and tail and name[2:].lower() == tail)
        for name in names
    )
