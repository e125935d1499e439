"""A Ray cluster as `ray start` makes it: a head with a client server, and raylets, each a process of ours.

What lives here: starting and ending nodes, and telling when they are there. What does not: Ray's own test
cluster (tests of one process joining it), network namespaces (`tests.support.netns`).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pdserve.fleet.cluster import local_environment
from pdserve.fleet.processes import adopt_orphans, end

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 90.0
RAY = str(Path(sys.executable).with_name("ray"))


@dataclass
class RayCluster:
    """Nodes by name. address: host:port of the cluster's store; client: of its client server."""

    directory: Path
    token_file: Path
    address: str
    client: str
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        """What a process needs to join."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return clean | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray's client server forks while gRPC's threads run; gRPC's own part in that can kill the child.
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            "PYTHONPATH": str(REPO),
        }

    def start_head(self, resources: Mapping[str, float]) -> None:
        """Starts the head and waits until its client server listens."""
        port, client = self.address.rpartition(":")[2], self.client.rpartition(":")[2]
        flags = ["--head", f"--port={port}", f"--ray-client-server-port={client}"]
        flags += ["--include-dashboard=false", f"--temp-dir={self.directory}"]
        self._start("head", [*flags, "--num-cpus=0"], resources)
        host = self.client.rpartition(":")[0]
        until(lambda: listens(host, int(client)), "Ray's client server")

    def start_node(self, name: str, resources: Mapping[str, float]) -> None:
        """Starts a raylet; it joins in its own time."""
        self._start(name, [f"--address={self.address}", "--num-cpus=1"], resources)

    def _start(self, name: str, flags: list[str], resources: Mapping[str, float]) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                [
                    RAY, "start", "--block", *flags, f"--resources={json.dumps(dict(resources))}",
                    "--node-ip-address=127.0.0.1", f"--object-store-memory={80 * 2**20}",
                    "--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0",
                    "--disable-usage-stats",
                ],
                env=self.environ(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def stop(self) -> None:
        """Ends everything, at once."""
        processes = [process for node in self.nodes.values() for process in family(node.pid)]
        end(processes, 0.0)
        for node in self.nodes.values():
            node.wait()
        self.nodes.clear()


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster without nodes yet, on loopback, with ports of its own.

    Its token is the one that every local head of this process has: Ray reads one once, for good.
    """
    adopt_orphans()
    # Ray puts Unix sockets below: the path must be short.
    directory = Path(tempfile.mkdtemp(prefix="pdserve-ray-", dir="/tmp"))
    token = directory / "token"
    ours: dict[str, str] = {}
    local_environment(ours)
    token.write_text(ours["RAY_AUTH_TOKEN"])
    token.chmod(0o600)
    port, client = free_ports(2)
    cluster = RayCluster(directory, token, f"127.0.0.1:{port}", f"127.0.0.1:{client}")
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def listens(host: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def until(wanted: Callable[[], object], what: str | Callable[[], str], limit_s: float = LIMIT_S) -> None:
    """Asks, ten times a second, until it is so. what: how to call it, asked for only when time is over."""
    deadline, pace = time.monotonic() + limit_s, threading.Event()
    while not wanted():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        pace.wait(0.1)
