"""A router as a child process: start it, know where it listens, drain it, end it."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import ServeConfig
from pdserve.config.addresses import advertised, host_port
from pdserve.config.resolve import variable
from pdserve.config.telemetry import TelemetrySettings
from pdserve.errors import BY_LABEL, InternalError, Unavailable
from pdserve.fleet.cluster import child_environment
from router.config import SECRET_VARIABLE

LISTEN_TIMEOUT_S = 30.0
END_PATIENCE_S = 5.0


@dataclass(slots=True)
class RouterChild:
    """A running router. It has a session of its own, so that Ctrl-C in the terminal reaches only us."""

    process: subprocess.Popen[bytes]
    address: str
    metrics_port: int
    http_url: str = ""

    @classmethod
    def start(cls, arguments: Sequence[str], secret: str, api_key: str = "") -> RouterChild:
        """Starts a router and waits until it listens. secret, api_key: go by its environment, where others do
        not see them. Raises the router's own error if it does not."""
        try:
            read, write = os.pipe()
        except OSError:
            raise Unavailable("no pipe can be made for the router") from None
        environ = {"GRPC_VERBOSITY": "NONE", **child_environment(os.environ), SECRET_VARIABLE: secret}
        if api_key:
            environ[variable("router", "api_key")] = api_key
        try:
            process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [sys.executable, "-m", "pdserve.cli", "router", *arguments, "--ready-fd", str(write)],
                pass_fds=(write,),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            os.close(read)
            raise Unavailable("no process can be started for the router") from None
        finally:
            os.close(write)
        try:
            message = json.loads(_line(read) or "{}")
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            os.close(read)
        if "address" in message:
            return cls(process, message["address"], message["metrics_port"] or 0, message["http_url"])
        process.kill()
        process.wait()
        error = message.get("error", {"label": "internal", "message": "the router ended while it started"})
        raise BY_LABEL.get(error["label"], InternalError)(error["message"])

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def drain(self, timeout_s: float) -> bool:
        """Asks it to finish what runs and end; True if it did in time."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s + END_PATIENCE_S) == 0
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """Ends it at once; no effect if it has ended."""
        if self.alive():
            self.process.kill()
            self.process.wait()


def router_arguments(config: ServeConfig, file: Path | None) -> list[str]:
    """The child's flags for settings that both share; its others come from the file and the environment."""
    shared = {
        "host": config.host,
        "port": config.port,
        "metrics-port": config.metrics_port,
        "http-port": config.http_port,
        "served-model-name": ",".join(config.served_model_name),
        "kv-mixing": config.kv_mixing,
        "local-prefill-threshold": config.local_prefill_threshold,
        "lease-s": config.lease_s,
        "drain-timeout-s": config.drain_timeout_s,
        "parent": os.getpid(),
        "tls-ca": config.tls_ca,
        "tls-cert": config.tls_cert,
        "tls-key": config.tls_key,
        "tls-server-name": config.tls_server_name,
    }
    flags = [text for name, value in shared.items() for text in (f"--{name}", str(value))]
    flags.append("--insecure" if config.insecure else "--no-insecure")
    for field in dataclasses.fields(TelemetrySettings):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        flags += (
            [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
        )
    if config.fleet_port:  # so that the router lists us for Prometheus; 0 is known too late
        flags += ["--fleet-metrics", advertised(host_port(config.host, config.fleet_port))]
    if config.api_key_file:
        flags += ["--api-key-file", config.api_key_file]
    if config.http is not None:
        flags += ["--http", "true" if config.http else "false"]
    if config.max_model_len is not None:
        flags += ["--max-model-len", str(config.max_model_len)]
    return flags + (["--config", str(file)] if file else [])


def _line(descriptor: int) -> str:
    """The first line from a pipe, "" if it ends before that. Raises Unavailable when nothing comes."""
    deadline, text = time.monotonic() + LISTEN_TIMEOUT_S, b""
    while not text.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise Unavailable("the router did not listen in time")
        piece = os.read(descriptor, 65536)
        if not piece:
            return ""
        text += piece
    return text.decode()
