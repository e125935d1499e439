"""A router and workers as processes of their own, without Ray: quick to start, easy to kill.

Real gRPC, real data plane, the default model in deterministic float32. Ray's part is tested in test_fleet*
and test_up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import Client, FleetStatus
from pdserve.config.worker import WorkerConfig
from pdserve.rpc import convert
from pdserve.rpc.channel import open_blocking_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.types import Role
from tests.support.certs import Certs

LIMIT_S = 90.0


@dataclass
class Stack:
    """Processes by name; `address` is the router's."""

    secret: str
    address: str
    router: subprocess.Popen[str]
    base: WorkerConfig
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    environ: dict[str, dict[str, str]] = field(default_factory=dict)
    certs: Certs | None = None
    worker_logs: Path | None = None

    @classmethod
    def start(
        cls,
        roles: dict[Role, int],
        *,
        environ: dict[str, dict[str, str]] | None = None,
        certs: Certs | None = None,
        router_flags: tuple[str, ...] = (),
        router_log: Path | None = None,
        worker_logs: Path | None = None,
        **settings: Any,
    ) -> Stack:
        """A router and so many workers by role. settings: fields of WorkerConfig. environ: more variables by
        the process's name ("router", "prefill-0", …; "" is all of them). certs: TLS everywhere. router_log:
        takes what the router says on stderr. worker_logs: a folder that takes the same of each worker."""
        tls = certs.settings() if certs else {}
        flags = [text for name, path in tls.items() for text in ("--" + name.replace("_", "-"), path)]
        flags += router_flags
        flags += [] if "--http-port" in router_flags else ["--http", "false"]
        secret = secrets.token_hex(32)
        more = environ or {}
        router_environ = {**os.environ, **more.get("", {}), **more.get("router", {})}
        router_environ["PDSERVE_FLEET_SECRET"] = secret
        command = [sys.executable, "-m", "pdserve.cli", "router", "--port", "0", "--metrics-port", "0"]
        with router_log.open("w") if router_log else contextlib.nullcontext() as log:
            router = subprocess.Popen(
                [*command, *flags], stdout=subprocess.PIPE, stderr=log, text=True, env=router_environ
            )
        assert router.stdout is not None
        found = re.search(r"listens on (\S+)", router.stdout.readline())
        assert found is not None
        base = WorkerConfig(
            worker_id="base", role=Role.DECODE, model="smollm2-135m-instruct", fleet_secret=secret,
            dtype="float32", deterministic=True, num_pages=256, prefill_chunk_tokens=64, token_budget=128,
            threads=2, routers=(found[1],), **tls,
        )  # fmt: skip
        stack = cls(secret, found[1], router, replace(base, **settings), environ=more, certs=certs)
        stack.worker_logs = worker_logs
        names = [(f"{role}-{i}", role) for role, count in roles.items() for i in range(count)]
        try:
            for name, role in names:
                stack.launch(name, role)
            for name, _ in names:
                stack.wait_started(name)
            stack.until(lambda status: len(usable(status)) == len(names))
            wait_serving(found[1], certs)
        except BaseException:
            stack.stop()
            raise
        return stack

    def launch(self, name: str, role: Role, **changes: Any) -> None:
        """Starts a worker process; see wait_started. changes: fields of WorkerConfig for this one alone."""
        environ = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
        environ |= self.environ.get("", {}) | self.environ.get(name, {})
        with (self.worker_logs / name if self.worker_logs else Path(os.devnull)).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pdserve.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(replace(self.base, worker_id=name, role=role, **changes).to_json().encode())
        process.stdin.close()
        self.workers[name] = process

    def wait_started(self, name: str) -> str:
        """Returns when the worker serves: host:port of its gRPC."""
        stdout = self.workers[name].stdout
        assert stdout is not None
        line = json.loads(stdout.readline())
        assert line["worker_id"] == name
        return str(line["control"])

    def kill(self, name: str) -> None:
        """SIGKILL, and waits for the end."""
        process = self.workers.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def client(self) -> Client:
        return Client(self.address, retry=None, **(self.certs.settings("client") if self.certs else {}))

    def until(self, wanted: Callable[[FleetStatus], bool]) -> FleetStatus:
        """Asks the router until its status is as wanted."""
        end = time.monotonic() + LIMIT_S
        while not wanted(status := self.status()):
            assert time.monotonic() < end, status
        return status

    def status(self) -> FleetStatus:
        """What the router says to one of its own fleet, whatever it asks of clients."""
        with channel_to(self.address, self.certs) as channel:
            stub = authenticated(inference_pb2_grpc.InferenceServiceStub(channel), bytes.fromhex(self.secret))
            answer = stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=LIMIT_S)
            return convert.fleet_status_from_pb(answer)

    def until_idle(self) -> None:
        """Waits until no worker holds anything: every page is free or evictable, and states add up."""
        addresses = [w.record.peer.control for w in self.status().workers if not w.suspect]
        end = time.monotonic() + LIMIT_S
        for address in addresses:
            with channel_to(address, self.certs) as channel:
                stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), bytes.fromhex(self.secret))
                while True:
                    answer = stub.GetWorkerStatus(cluster_pb2.GetWorkerStatusRequest(), timeout=LIMIT_S)
                    state = convert.worker_state_from_pb(answer)
                    assert not state.integrity_problem
                    if state.idle:
                        break
                    assert time.monotonic() < end, state

    def stop(self) -> None:
        """Ends all processes."""
        for process in [*self.workers.values(), self.router]:
            process.kill()
            process.wait()


def usable(status: FleetStatus) -> list[str]:
    """Names of the workers that get work."""
    return [w.record.peer.worker_id for w in status.workers if not w.suspect and w.load.ready]


def channel_to(address: str, certs: Certs | None = None) -> grpc.Channel:
    """A channel such as a client of this stack has."""
    return open_blocking_channel(address, tls=certs.source("client") if certs else None)


def wait_serving(address: str, certs: Certs | None = None) -> None:
    """Returns when the router has the model's tokenizer and serves."""
    with channel_to(address, certs) as channel:
        request = health_pb2.HealthCheckRequest(service="pdserve.rpc.v1.InferenceService")
        for answer in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=LIMIT_S):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
