"""The listener: uvicorn in the router's event loop, on a socket of ours, with TLS from the router's files.

uvicorn's own handlers of signals are left out: the router drains. What does not live here: the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdserve.errors import ConfigError
from pdserve.rpc.server import check_bind
from pdserve.tls import TlsSource
from router.http.guard import MAX_HEADER_BYTES

HEADER_TIMEOUT_S = 15.0
KEEP_ALIVE_S = 75
STALLED_S = 60.0
"""How long a client may read nothing while there is something for it; then its connection is cut."""
GRACE_S = 1
_BACKLOG = 1024


class HttpServer:
    """An HTTP server for one application. Owned by one event loop; `url` is set by `start`."""

    def __init__(
        self, app: ASGIApp, *, host: str, port: int, insecure: bool = False, tls: TlsSource | None = None
    ) -> None:
        """port: 0 lets the system choose. Raises ConfigError for an address that may not be listened on."""
        check_bind(host, insecure=insecure, tls=tls is not None)
        self._host, self._port = host.strip("[]"), port
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(_config(app, tls))
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listens and serves. Raises ConfigError if the port can not be had."""
        listener = _listen(self._host, self._port)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{self._scheme}://{shown}:{listener.getsockname()[1]}"
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([listener]))
        self._serving.add_done_callback(lambda _: self._server.up.set())
        await self._server.up.wait()
        if self._serving.done():
            listener.close()
            serving, self._serving = self._serving, None
            raise ConfigError("http: the server did not start") from serving.exception()

    async def stop(self) -> None:
        """No more connections; responses under way have a moment to end. Safe to call twice."""
        if self._serving is None:
            return
        self._server.should_exit = True
        serving, self._serving = self._serving, None
        with contextlib.suppress(asyncio.CancelledError):
            await serving


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them to the router."""
        yield


class _Protocol(H11Protocol):
    """HTTP/1.1 with bounds on how long a request's headers may take, and how long nothing is read."""

    _slow: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        self._reads_again()

    def pause_writing(self) -> None:
        """More waits for the client than it takes. It would hold its place of MAX_UNDER_WAY for ever."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads_again()

    def _reads_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch(self) -> None:
        """A connection in the middle of headers, or that has not begun, is closed after a while."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_watching()
        elif self._slow is None:
            self._slow = self.loop.call_later(HEADER_TIMEOUT_S, self._too_slow)

    def _stop_watching(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        self._slow = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()


def _config(app: ASGIApp, tls: TlsSource | None) -> uvicorn.Config:
    more: dict[str, Any] = {} if tls is None else {"ssl_context_factory": lambda *_: _context(tls)}
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        loop="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        **more,
    )


def _context(tls: TlsSource) -> ssl.SSLContext:
    """A context that hands every handshake over to the newest certificate."""
    first = tls.current().server

    def newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = tls.current().server

    first.sni_callback = newest
    return first


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol: asyncio sets TCP_NODELAY only where it is told, and a token would wait 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError:
        raise ConfigError("host: is no address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise ConfigError(
            f"http_port: port {port} can not be listened on; is it in use? Choose another, or --http false."
        ) from None
    return listener
