"""gRPC servers: where they may listen, their limits, health, reflection, and errors as rich statuses.

What a server serves is its owner's business: add servicers to `RpcServer.server`, then `start()`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.config.addresses import host_port, is_loopback
from pdserve.errors import ConfigError
from pdserve.rpc.channel import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES
from pdserve.rpc.intercept import ErrorInterceptor

if TYPE_CHECKING:
    from pdserve.tls import TlsSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where and how a gRPC server listens.

    host: loopback unless `tls` or `insecure`. port: 0 lets the system choose. reflection: serve the
    descriptors. tls: our certificate; clients must show one of the same authority.
    """

    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    reflection: bool = False
    tls: TlsSource | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_metadata_bytes: int = MAX_METADATA_BYTES


def check_bind(host: str, *, insecure: bool, tls: bool = False) -> None:
    """Raises ConfigError for an address others can reach, unless there is TLS or `insecure` was given."""
    if tls or is_loopback(host):
        return
    if not insecure:
        raise ConfigError(
            "Beyond loopback connections must be encrypted: give --tls-ca, --tls-cert and --tls-key. "
            "Or use 127.0.0.1, or give --insecure explicitly on a network you trust."
        )
    log.warning("listening on a non-loopback address without TLS (--insecure): anyone there can connect")


def server_options(options: ServerOptions) -> list[tuple[str, int]]:
    """Channel arguments of a server: size limits, keepalive both ways, no port sharing."""
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", options.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", options.max_metadata_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 4000),
        ("grpc.keepalive_timeout_ms", 4000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class RpcServer:
    """A grpc.aio server with health and error handling. Owned by one event loop; `port` is set by `start`."""

    def __init__(
        self, options: ServerOptions, *, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = ()
    ) -> None:
        """Raises ConfigError for an address that may not be listened on. Must be called in a running loop."""
        check_bind(options.host, insecure=options.insecure, tls=options.tls is not None)
        self._options = options
        self.server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *interceptors], options=server_options(options)
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self.port = 0

    @property
    def address(self) -> str:
        """host:port for those who dial, once started."""
        return host_port(self._options.host, self.port)

    async def start(self, *service_names: str) -> int:
        """Listens and serves; returns the port. service_names: full names, for health and reflection.

        Raises ConfigError if the port can not be had.
        """
        if self._options.reflection:
            self._enable_reflection(service_names)
        self.port = self._bind()
        await self.server.start()
        for name in ("", *service_names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self.port

    def _bind(self) -> int:
        address = host_port(self._options.host, self._options.port)
        try:
            if self._options.tls is None:
                return self.server.add_insecure_port(address)
            from pdserve.rpc.credentials import server_credentials

            return self.server.add_secure_port(address, server_credentials(self._options.tls))
        except RuntimeError as error:
            raise ConfigError(
                f"Port {self._options.port} can not be listened on; is it in use? Choose another."
            ) from error

    def _enable_reflection(self, service_names: Sequence[str]) -> None:
        from grpc_reflection.v1alpha import reflection  # lazily: only where the flag asks for it

        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def set_serving(self, name: str, serving: bool) -> None:
        """Changes what the health service says about one service; "" is the whole server."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def not_serving(self) -> None:
        """Health says NOT_SERVING for good, for all names; calls still work."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new calls at once, ends running ones after `grace_s`. Safe to call twice."""
        await self.server.stop(grace_s)
