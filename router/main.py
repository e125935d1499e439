"""A router process: the servers around a hub, start, drain and stop. No torch and no ray in it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from pdserve import failpoints
from pdserve.clock import Clock, MonotonicClock
from pdserve.config.addresses import advertised, host_port
from pdserve.config.tls import tls_source
from pdserve.obs.port import MetricsPort, Page
from pdserve.rpc.guard import AccessGuard
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.rpc.v1 import cluster_pb2_grpc, inference_pb2_grpc
from router import neighbours
from router.audit import AuditLog, Entry
from router.auth.authenticator import Authenticator
from router.auth.clients import EdgeClients
from router.config import RouterConfig
from router.http.serving import http_server
from router.hub import Hub
from router.probes import Probes
from router.service import CLUSTER, INFERENCE, ClusterServicer, InferenceServicer
from router.targets import targets

log = logging.getLogger(__name__)


class Router:
    """A router with its sockets. `address` and `metrics_port` are set by `start`."""

    def __init__(self, config: RouterConfig, clock: Clock | None = None) -> None:
        """Raises ConfigError. Must be called in the running loop that will serve."""
        failpoints.require_allowed()
        self._config = config
        tls = tls_source(config)
        clock = clock or MonotonicClock()
        self.hub = Hub(config, clock, tls)
        count = self.hub.metrics.auth_failure
        self._audit = AuditLog(config.audit_log)
        self.auth = Authenticator(config, count=count, keys_changed=self._audit.keys_changed, clock=clock)
        clients = EdgeClients(self.auth, self._audit, count)
        self._rpc = RpcServer(
            ServerOptions(
                host=config.host,
                port=config.port,
                insecure=config.insecure,
                reflection=config.reflection,
                tls=tls,
            ),
            interceptors=[AccessGuard(config.secret_bytes(), clients)],
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self.hub), self._rpc.server
        )
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(
            ClusterServicer(self.hub.roster), self._rpc.server
        )
        self._served = [INFERENCE, *neighbours.add_to(self._rpc.server, self.hub, config.protocols)]
        self._http = http_server(config, self.hub, tls, self.auth.check)
        self._metrics: MetricsPort | None = None
        self._probes = Probes()
        self._draining = False
        self._ready: bool | None = None
        self._health: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port of the gRPC server, for clients and for workers to join."""
        return self._rpc.address

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics; None if they are off."""
        return self._metrics.port if self._metrics is not None else None

    @property
    def metrics_url(self) -> str:
        """Where the metrics and `/targets` are; empty if they are off."""
        return f"http://{advertised(self._metrics_address())}" if self._metrics is not None else ""

    def _metrics_address(self) -> str:
        return host_port(self._config.host, self.metrics_port or 0)

    @property
    def http_url(self) -> str:
        """Where the HTTP API is; empty if it is off."""
        return self._http.url if self._http is not None else ""

    async def start(self) -> None:
        """Listens. Health says that inference is served once a request has a path. Raises ConfigError."""
        if self._config.metrics:
            pages = {"/targets": self._targets, **self._probes.pages()}
            self._metrics = self.hub.metrics.serve(self._config.host, self._config.metrics_port, pages)
        try:
            await self._rpc.start(CLUSTER, *self._served)
            if self._http is not None:
                await self._http.start()
        except BaseException:
            await self.stop()
            raise
        await self._set_serving(False)
        self.hub.on_ready = self._on_ready
        self.hub.start()

    def _targets(self) -> Page:
        """What Prometheus should scrape. Called on a thread of the metrics port."""
        return targets(self._metrics_address(), self.hub.roster.members(), self._config.fleet_metrics)

    def _on_ready(self, ready: bool) -> None:
        if ready == self._ready:
            return
        self._ready = ready
        self._probes.ready = ready and not self._draining
        task = asyncio.get_running_loop().create_task(self._set_serving(ready))
        self._health.add(task)
        task.add_done_callback(self._health.discard)

    async def _set_serving(self, ready: bool) -> None:
        for name in self._served:
            await self._rpc.set_serving(name, ready)

    async def drain(self) -> None:
        """No new requests; running ones finish, up to the configured time."""
        if self._config.audit_log:  # nobody called: the terminal need not be told
            self._audit.write(Entry(action="drain"), "ok")
        self._draining, self._probes.ready = True, False
        await self._rpc.not_serving()
        await self.hub.drain(self._config.drain_timeout_s)

    async def stop(self) -> None:
        """Ends everything at once. Safe to call twice."""
        await self.hub.close()
        # Ended streams still flush their last status.
        if self._http is not None:
            await self._http.stop()
        await self._rpc.stop(grace_s=1.0)
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


async def serve(
    config: RouterConfig,
    ready_event: asyncio.Event | None = None,
    *,
    stop_event: asyncio.Event | None = None,
    handle_signals: bool = True,
    on_listening: Callable[[Router], None] = lambda router: None,
) -> None:
    """Serves until SIGTERM, SIGINT or `stop_event`, then drains; a second signal ends at once.

    ready_event is set, and on_listening called, when the sockets listen. Raises ConfigError.
    """
    stop = stop_event or asyncio.Event()
    if handle_signals:
        _on_signals(stop)
    router = Router(config)
    await router.start()
    try:
        log.info("router listens on %s %s", router.address, router.http_url)
        if ready_event is not None:
            ready_event.set()
        on_listening(router)
        await stop.wait()
        await _drain_or_second_signal(router, handle_signals)
    finally:
        await router.stop()


def _on_signals(event: asyncio.Event) -> None:
    """From now on SIGTERM and SIGINT set this event, and nothing else."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)


async def _drain_or_second_signal(router: Router, handle_signals: bool) -> None:
    again = asyncio.Event()
    if handle_signals:
        _on_signals(again)
    drain = asyncio.ensure_future(router.drain())
    hurry = asyncio.ensure_future(again.wait())
    await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    await asyncio.gather(drain, hurry, return_exceptions=True)
