"""Network namespaces on one bridge: each stands for a pod with an address of its own. Needs root."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Namespace:
    """name: for `ip netns exec`. address: on the bridge."""

    name: str
    address: str

    def port(self, declared: int) -> int:
        """The same: all ports are its own."""
        return declared


@dataclass
class Network:
    """A bridge with a subnet; this machine has its first address."""

    tag: str = field(default_factory=lambda: f"pd{secrets.token_hex(3)}")
    subnet: str = field(default_factory=lambda: f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}")
    made: list[str] = field(default_factory=list)
    count: int = 0

    def add(self) -> Namespace:
        """A new namespace that reaches all others and this machine."""
        self.count += 1
        name, address = f"{self.tag}-{self.count}", f"{self.subnet}.{self.count + 1}"
        ip("netns", "add", name)
        self.made.append(name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", self.tag, "up")
        for command in (
            f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up",
            f"route add default via {self.subnet}.1",
        ):  # fmt: skip
            ip("-n", name, *command.split())
        return Namespace(name, address)


@contextmanager
def network() -> Iterator[Network]:
    """A network for the time of the block."""
    net = Network()
    ip("link", "add", net.tag, "type", "bridge")
    try:
        ip("addr", "add", f"{net.subnet}.1/24", "dev", net.tag)
        ip("link", "set", net.tag, "up")
        yield net
    finally:
        for name in net.made:
            ip("netns", "del", name)
        ip("link", "del", net.tag)


def ip(*arguments: str) -> None:
    """Runs `ip`; raises AssertionError with what it said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
