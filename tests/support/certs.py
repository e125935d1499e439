"""Certificates for tests, made by the same code as `pdserve certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.cli.certs import run
from pdserve.tls import TlsFiles, TlsSource
from pdserve.tls.make import Pair, issue, make_authority

HOSTS = ("127.0.0.1", "localhost")


class Certs:
    """A directory as `pdserve certs` fills it: ca, node, client; more certificates on demand."""

    def __init__(self, directory: Path, hosts: tuple[str, ...] = HOSTS) -> None:
        """Makes what is not there."""
        self.directory, self.hosts = directory, hosts
        if not (directory / "node.crt").exists():
            self.rotate()

    def rotate(self) -> None:
        """New node and client certificates of the same authority."""
        run(self.directory, self.hosts, 3)

    @property
    def authority(self) -> Pair:
        return Pair(cert=self._read("ca.crt"), key=self._read("ca.key"))

    def settings(self, name: str = "node", **changes: str) -> dict[str, str]:
        """The TLS settings of a process that has this certificate."""
        paths = {f"tls_{kind}": str(self.directory / f"{name}.{end}") for kind, end in _ENDS.items()}
        return paths | {"tls_ca": str(self.directory / "ca.crt")} | changes

    def files(self, name: str = "node", **changes: str) -> TlsFiles:
        settings = self.settings(name, **changes)
        return TlsFiles(**{key.removeprefix("tls_"): value for key, value in settings.items()})

    def source(self, name: str = "node", **changes: str) -> TlsSource:
        """The identity of a process."""
        return TlsSource(self.files(name, **changes), serves=name != "client")

    def issue(self, name: str, *, foreign: bool = False, **options: Any) -> None:
        """One more certificate under that name; foreign: of another authority."""
        authority = make_authority("somebody else") if foreign else self.authority
        self.write(name, issue(authority, name, **({"hosts": self.hosts} | options)))

    def write(self, name: str, pair: Pair) -> None:
        for end, content in (("key", pair.key), ("crt", pair.cert)):
            path = self.directory / f"{name}.{end}"
            path.touch(mode=0o600)
            path.write_bytes(content)

    def _read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()


_ENDS = {"cert": "crt", "key": "key"}
