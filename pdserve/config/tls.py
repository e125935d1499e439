"""The four TLS settings that every component has, as one value."""

from __future__ import annotations

from typing import Protocol

from pdserve.tls.files import TlsFiles
from pdserve.tls.source import TlsSource


class TlsSettings(Protocol):
    """A configuration with the TLS settings."""

    @property
    def tls_ca(self) -> str: ...

    @property
    def tls_cert(self) -> str: ...

    @property
    def tls_key(self) -> str: ...

    @property
    def tls_server_name(self) -> str: ...


def tls_files(config: TlsSettings) -> TlsFiles | None:
    """The files; None without TLS. Raises ConfigError if only some are given."""
    return TlsFiles.of(config.tls_ca, config.tls_cert, config.tls_key, config.tls_server_name)


def tls_source(config: TlsSettings, *, serves: bool = True) -> TlsSource | None:
    """What is in them, checked; None without TLS. Raises ConfigError with a sentence."""
    files = tls_files(config)
    return None if files is None else TlsSource(files, serves=serves)
