"""Router and workers as processes of their own, configured as `pdserve up` configures them, without Ray.

What lives here: starting them (from this source tree or another one), knowing when they serve, ending them.
What does not: what is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

from pdserve.client import Client, FleetStatus
from pdserve.config import ServeConfig
from pdserve.config.precision import STRICT
from pdserve.errors import Unavailable
from pdserve.fleet.placement import thread_variables
from pdserve.types import Role

START_TIMEOUT_S = 240.0
ROOT = Path(__file__).resolve().parents[1]


class StackError(Exception):
    """A process did not come up, in words."""


class Stack:
    """One router and its workers. `client` speaks to the router."""

    def __init__(self, config: ServeConfig, tree: Path = ROOT) -> None:
        """Starts all processes and waits until they serve. config: resolved. Raises StackError."""
        self._tree = tree
        self._secret = secrets.token_hex(32)
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self.address = self._start_router(config)
            self.client = Client(self.address)
            names = [(f"{role}-{i}", role) for role, count in config.wanted().items() for i in range(count)]
            for name, role in names:
                self._start_worker(config, name, role)
            self._wait(len(names))
        except BaseException:
            self.stop()
            raise

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        return kept | {"PYTHONPATH": str(self._tree), "PDSERVE_FLEET_SECRET": self._secret}

    def _start_router(self, config: ServeConfig) -> str:
        command = [
            sys.executable,
            "-m",
            "pdserve.cli",
            "router",
            "--port",
            "0",
            "--metrics-port",
            "0",
            "--http-port",
            "0",
        ]
        command += ["--kv-mixing", config.kv_mixing or STRICT]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self._environ(), cwd=self._tree
        )
        self._processes.append(process)
        assert process.stdout is not None
        found = re.search(r"listens on (\S+)", process.stdout.readline())
        if found is None:
            raise StackError("the router did not start")
        return found[1]

    def _start_worker(self, config: ServeConfig, name: str, role: Role) -> None:
        worker = config.worker(role, secret=self._secret, routers=(self.address,), run_dir="")
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            env=self._environ() | thread_variables(worker.threads), cwd=self._tree,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(dataclasses.replace(worker, worker_id=name).to_json())
        process.stdin.close()

    def _wait(self, num_workers: int) -> None:
        """Until every worker is ready and the router has its model."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                raise StackError("a process ended while it started")
            with contextlib.suppress(Unavailable):  # the router has no worker yet, or not its tokenizer
                if sum(worker.load.ready for worker in self.status().workers) >= num_workers:
                    self.client.generate(token_ids=[1] * 20, max_tokens=2, deadline_s=60.0).result()
                    return
            time.sleep(0.2)
        raise StackError(f"not ready within {START_TIMEOUT_S:.0f} s")

    def cpu_s(self) -> float:
        """CPU seconds that all our processes have used so far."""
        return sum(_cpu_ns(process.pid) for process in self._processes) * 1e-9

    def status(self) -> FleetStatus:
        """The router's view."""
        return self.client.get_status()

    def stop(self) -> None:
        """Ends all processes."""
        if hasattr(self, "client"):
            self.client.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _cpu_ns(pid: int) -> int:
    """Of all threads that live; by the scheduler's own count, which is exact. 0 where there is none."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended, a kernel without it
            total += int((task / "schedstat").read_text().split()[0])
    return total


def describe(config: ServeConfig) -> str:
    """The flags of `pdserve up` that give the same workers, beside the defaults."""
    usual = ServeConfig().resolved()
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(usual, field.name):
            parts.append(f"--{field.name.replace('_', '-')} {json.dumps(value).strip(chr(34))}")
    return " ".join(["pdserve up", *parts])
