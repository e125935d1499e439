"""The settings of mutual TLS: which files, and the name a peer must have.

What lives here: reading the files and refusing a key that others can read. What does not: what is in them
(`contexts`), and noticing that they changed (`source`).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from pdserve.errors import ConfigError

FIXED_NAME = "pdserve.internal"
"""In every node certificate that `pdserve certs` makes, for fleets whose addresses change."""
Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files: the authorities we trust, our certificate (with its chain), and its key.

    server_name: checked against the certificates of those we dial, in place of the host we dialled; empty:
    the host itself.
    """

    ca: str
    cert: str
    key: str
    server_name: str = ""

    @classmethod
    def of(cls, ca: str, cert: str, key: str, server_name: str = "") -> TlsFiles | None:
        """The files of these settings; None if all are empty. Raises ConfigError if only some are given."""
        given = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
        missing = [name for name, path in given.items() if not path]
        if not missing:
            return cls(ca=ca, cert=cert, key=key, server_name=server_name)
        if len(missing) < len(given) or server_name:
            raise ConfigError(f"{missing[0]}: tls_ca, tls_cert and tls_key go together; this one is missing")
        return None

    def signature(self) -> Signature:
        """Differs when a file was replaced or written. Raises ConfigError for a missing file."""
        return tuple(
            (info.st_mtime_ns, info.st_size, info.st_ino) for info in map(_stat, _NAMES, self._paths())
        )

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Authorities, certificate and key. Raises ConfigError, also for a key that others can read."""
        _check_private(self.key)
        ca, cert, key = map(_read, _NAMES, self._paths())
        return ca, cert, key

    def _paths(self) -> tuple[str, str, str]:
        return self.ca, self.cert, self.key


_NAMES = ("tls_ca", "tls_cert", "tls_key")


def _stat(name: str, path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        raise ConfigError(f"{name}: there is no such file, or it can not be reached") from None


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        raise ConfigError(f"{name}: the file can not be read") from None


def _check_private(path: str) -> None:
    """A key is for its user alone. Root may share it with a group: so Kubernetes mounts secrets."""
    info = _stat("tls_key", path)
    shared_by_root = info.st_uid == 0 and os.geteuid() != 0
    allowed = stat.S_IRWXU | (stat.S_IRGRP if shared_by_root else 0)
    if stat.S_IMODE(info.st_mode) & ~allowed:
        raise ConfigError("tls_key: others can read or change the key; make it private with chmod 600")
