"""Pods on loopback, where nothing but an ordinary user's rights is needed.

Each has an address and ports of its own there, and directories in place of mounts. Values of manifests say
other paths, ports and names of Services: `Loopback.value` gives what stands for them. Not here: a root that
can not be written, and kernel settings.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_PORT = re.compile(r"(--(?:[a-z-]+-)?port)=([1-9]\d*)")
_SERVICE = re.compile(r"(?:dns\+)?([a-z0-9.-]+):(\d+)$")


class Place(Protocol):
    """Where a pod is."""

    @property
    def address(self) -> str:
        """Its own."""

    def port(self, declared: int) -> int:
        """Where it listens for what the manifest calls by this port."""


@dataclass
class Loopback:
    """mounts: directories by the paths they stand for. services: places behind names. free: ports to take."""

    address: str
    mounts: Mapping[str, Path]
    services: Mapping[str, Sequence[Place]]
    free: Iterator[int]
    node_id: str = field(default_factory=lambda: secrets.token_hex(28))
    _ports: dict[int, int] = field(default_factory=dict)

    def port(self, declared: int) -> int:
        """See Place."""
        if declared not in self._ports:
            self._ports[declared] = next(self.free)
        return self._ports[declared]

    def value(self, text: str) -> str:
        """An argument or a variable of the manifest as it is here."""
        if found := _PORT.fullmatch(text):
            return f"{found[1]}={self.port(int(found[2]))}"
        paths = "|".join(sorted(map(re.escape, self.mounts), key=len, reverse=True))
        text = re.sub(rf"(?<![^=])({paths})(?![^/])", lambda path: str(self.mounts[path[1]]), text)
        if (found := _SERVICE.search(text)) and found[1] in self.services:
            behind = self.services[found[1]]
            all_of = ",".join(f"{place.address}:{place.port(int(found[2]))}" for place in behind)
            text = text[: found.start()] + all_of
        # Ray would take the node of the head for the one that this process is on: it looks for any.
        return text.replace("0.0.0.0", self.address).replace("--here", f"--node={self.node_id}")

    def environment(self) -> dict[str, str]:
        """What takes the place of mounts for programs that are not told."""
        return {"TMPDIR": self.value("/tmp")}

    def ray_environment(self) -> dict[str, str]:
        """What a Ray node needs in addition."""
        return {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": self.node_id}

    def ray_start(self, command: list[str]) -> list[str]:
        """`ray start` for one node of several on a machine: each listens on all addresses."""
        kept = [part for part in command if not part.startswith(("--min-worker-port", "--max-worker-port"))]
        defaults = ["--port=6379", "--ray-client-server-port=10001"] if "--head" in command else []
        own = [f"--node-ip-address={self.address}", "--temp-dir=/tmp", "--min-worker-port=0"]
        return [*kept, *defaults, *own, "--max-worker-port=0"]


def addresses() -> Iterator[str]:
    """Addresses of loopback, others in each run."""
    subnet = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
    return (f"{subnet}.{number}" for number in range(2, 255))


def ports() -> Iterator[int]:
    """Ports nobody listens on, each once; connections do not get such as their own ends."""
    for port in range(20000 + secrets.randbelow(8000), 32000):
        with socket.socket() as tried:
            try:
                tried.bind(("0.0.0.0", port))
            except OSError:
                continue
        yield port
