"""`pdserve certs`: an authority and certificates for a fleet, as files that running processes reload."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pdserve.errors import ConfigError


def run(directory: Path, hosts: tuple[str, ...], days: int) -> None:
    """Makes ca, node and client files; an authority that is there is used again. Raises ConfigError."""
    try:
        from pdserve.tls.make import Pair, issue, make_authority
    except ImportError:
        raise ConfigError("certs: needs one more package: pip install 'pdserve[tls]'") from None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _read(directory / "ca.crt"), _read(directory / "ca.key")
        if bool(found[0]) != bool(found[1]):
            raise ConfigError("certs: the directory holds only half of an authority, ca.crt or ca.key")
        authority = Pair(cert=found[0], key=found[1]) if found[0] else make_authority()
        pairs = {
            "node": issue(authority, "pdserve node", hosts=hosts, days=days),
            "client": issue(authority, "pdserve client", days=days, serves=False),
        }
        if not found[0]:
            pairs = {"ca": authority, **pairs}
        for name, pair in pairs.items():
            _write(directory / f"{name}.key", pair.key)
            _write(directory / f"{name}.crt", pair.cert)
    except OSError as error:
        raise ConfigError(f"certs: the directory can not be used: {error.strerror}") from None
    _tell(hosts, days, new=not found[0])


def _tell(hosts: tuple[str, ...], days: int, *, new: bool) -> None:
    print(
        f"{'a new authority' if new else 'the authority that was there'}; certificates for {days} days:\n"
        "  ca.crt               for everybody: --tls-ca\n"
        f"  node.crt, node.key   for router and workers at {', '.join(hosts)}\n"
        "  client.crt, client.key   for clients\n"
        "  ca.key               signs new ones: keep it away from the machines that serve"
    )


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _write(path: Path, content: bytes) -> None:
    """Replaces a file in one step, private to its user, so that nobody reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
