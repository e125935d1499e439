"""`pdserve up`: Ray, workers and router on this machine, until told to stop; then nothing is left."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import replace
from pathlib import Path

from pdserve.cli.connection import Router
from pdserve.cli.phases import Phases, warn
from pdserve.cli.platforms import require_transport
from pdserve.cli.router_child import RouterChild, router_arguments
from pdserve.cli.router_keeper import RouterKeeper
from pdserve.cli.stopping import StopSignals
from pdserve.cli.workers import describe, ray_of, start_workers, telling_logs, wait_workers, watching
from pdserve.client import Client
from pdserve.config import ServeConfig
from pdserve.config.addresses import advertised, host_port
from pdserve.config.tls import tls_source
from pdserve.errors import Unavailable
from pdserve.fleet.handle import FleetHandle
from pdserve.fleet.rundirs import run_directory
from pdserve.obs.logging import log_as

EXIT_OK, EXIT_INTERRUPTED = 0, 130
WATCH_S = 0.1


def run(config: ServeConfig, file: Path | None) -> int:
    """Serves until a signal; returns the exit code. config: resolved. Raises PdserveError."""
    log_as(config, "up")
    phases = Phases()
    numbers = f"{config.dtype}, precision {config.precision}"
    print(f"pdserve: {config.model} in {numbers}, {describe(config.wanted())} workers", flush=True)
    if config.insecure:
        warn("insecure: listeners beyond loopback have neither TLS nor a login")
    tls_source(config)  # before anything is started
    if not config.ray_address:  # elsewhere the workers' installations count
        require_transport(config.transport)
    secret = secrets.token_hex(32)
    with StopSignals() as signals, contextlib.ExitStack() as stack:
        try:
            router, fleet = _start(config, file, phases, secret, stack)
            signals.serving()  # whoever reads that we are ready may stop us at once
            _ready(router.child, config, phases)
            while not signals.requested.wait(WATCH_S):
                router.watch()
            signals.draining()
            _stop(router.child, fleet, config, phases)
            code = EXIT_OK
        except KeyboardInterrupt:
            phases.say("interrupted: ending everything now")
            code = EXIT_INTERRUPTED
        finally:
            signals.ending()
    phases.say("stopped; nothing is left running")
    return code


def _start(
    config: ServeConfig, file: Path | None, phases: Phases, secret: str, stack: contextlib.ExitStack
) -> tuple[RouterKeeper, FleetHandle]:
    """Starts all parts. What has been started is ended by the stack, whatever happens."""
    run_dir = stack.enter_context(run_directory("up"))
    with phases.phase("router", f"starting on {config.host}:{config.port}"):
        router = RouterKeeper(lambda *ports: _start_router(config, file, secret, ports), say=warn)
    stack.callback(router.kill)
    logs = stack.enter_context(ray_of(config, phases))
    routers = (advertised(router.child.address),)
    fleet = start_workers(config, phases, secret=secret, routers=routers, run_dir=run_dir)
    stack.callback(fleet.shutdown, 0.0)
    stack.enter_context(watching(fleet, config))
    with telling_logs(logs):
        wait_workers(fleet, config, phases)
    with phases.phase("join", "waiting until the router has met every worker"):
        _wait_met(
            _dialled(router.child, config, secret), sum(config.wanted().values()), config.start_timeout_s
        )
    return router, fleet


def _start_router(
    config: ServeConfig, file: Path | None, secret: str, ports: tuple[int | None, ...]
) -> RouterChild:
    """ports: for gRPC, metrics and HTTP; None where the configuration decides."""
    port, metrics_port, http_port = ports
    config = replace(
        config,
        port=config.port if port is None else port,
        metrics_port=config.metrics_port if metrics_port is None else metrics_port,
        http_port=config.http_port if http_port is None else http_port,
    )
    key = "" if config.api_key_file else config.api_key
    return RouterChild.start(router_arguments(config, file), secret, key)


def _dialled(router: RouterChild, config: ServeConfig, secret: str) -> Router:
    """How we call it ourselves: a certificate names an address, not "all of them"."""
    return Router.of(advertised(router.address), config, secret)


def _wait_met(router: Router, count: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with router.client() as client:
        while not _serves(client, count):
            if time.monotonic() > deadline:
                raise Unavailable("the workers serve, but the router has not met them all")
            time.sleep(0.05)


def _serves(client: Client, count: int) -> bool:
    """Whether the router has met so many workers, and has fetched the model's tokenizer from one of them."""
    if sum(not worker.suspect for worker in client.get_status().workers) < count:
        return False
    with contextlib.suppress(Unavailable):
        return bool(client.get_model().model)
    return False


def _ready(router: RouterChild, config: ServeConfig, phases: Phases) -> None:
    flag = "" if config.port == 50051 else f" --address {router.address}"
    flag += " --tls-ca … --tls-cert … --tls-key …" if config.tls_ca else ""
    port = router.metrics_port
    metrics = f"metrics on http://{host_port(config.host, port)}/metrics; " if port else ""
    http = f"        HTTP API (OpenAI, Anthropic) on {router.http_url}/v1\n" if router.http_url else ""
    print(
        f"ready on {router.address} after {phases.summary()}\n"
        f'  try:  pdserve generate "The capital of France is" --max-tokens 32{flag}\n'
        f"        pdserve chat{flag}\n{http}"
        f"  {metrics}Ctrl-C drains and stops",
        flush=True,
    )


def _stop(router: RouterChild, fleet: FleetHandle, config: ServeConfig, phases: Phases) -> None:
    """The router first: no new requests, running ones finish. Then the workers, idle by now."""
    with phases.phase(
        "drain", f"no new requests; running ones have {config.drain_timeout_s:g} s (Ctrl-C: none)"
    ):
        if router.alive() and not router.drain(config.drain_timeout_s):
            warn("some requests were cut off")
        fleet.shutdown(config.drain_timeout_s)
