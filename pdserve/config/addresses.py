"""Addresses: which ones stay on this machine, and by which one others reach us."""

from __future__ import annotations

import ipaddress
import socket

from pdserve.errors import ConfigError

DNS = "dns+"
"""Before host:port: every address behind the name, whichever these are at the time."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_port(host: str, port: int) -> str:
    """As one text; an IPv6 address gets the brackets that it needs there."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def advertised(address: str) -> str:
    """host:port by which others reach a listener; one on every interface goes by this node's address."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in {"0.0.0.0", "::", ""}:  # noqa: S104
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel picks the outgoing address
        return f"{probe.getsockname()[0]}:{port}"


def check_router(entry: str) -> None:
    """Raises ConfigError unless an entry of `routers` is host:port, or dns+host:port."""
    host, colon, port = entry.removeprefix(DNS).rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError("routers: must be host:port, or dns+host:port")
