"""The HTTP port of a process that others watch: `/metrics` for Prometheus, and other small pages by path.

Here: a server of its own on threads, so that a busy process still answers. Not here: the router's API
(`router.http`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from io import StringIO
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
"""A caller may take so long for its request line or to read a part of the answer."""
MAX_CALLERS = 32
"""Connections at once. One more, and the oldest is cut: who dawdles locks nobody out, and takes no file
descriptors and threads from the requests that the process is there for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One answer. status: of HTTP. content: its media type."""

    body: bytes
    status: int = 200
    content: str = "text/plain; charset=utf-8"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *about: Any) -> None:
        self._lock = Lock()
        self._callers: dict[socket, None] = {}
        self._num_served = 0
        super().__init__(*about)

    def server_bind(self) -> None:
        """Binds as TCPServer does: HTTPServer would ask a name server who we are, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a caller's thread; on the listening thread."""
        oldest = None
        with self._lock:
            self._num_served += 1
            self._callers[request] = None
            full = self._num_served > 2 * MAX_CALLERS  # those cut have not all noticed yet
            if len(self._callers) > MAX_CALLERS:
                oldest = next(iter(self._callers))
                del self._callers[oldest]
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(SHUT_RDWR)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of every caller, once."""
        with self._lock:
            self._num_served -= 1
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away or took too long is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a call to a metrics port failed")


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = READ_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every few seconds is no news."""

    def address_string(self) -> str:
        """The number: no name server is asked."""
        return str(self.client_address[0])

    def get_stderr(self) -> Any:
        """Nowhere: `_app` logs what fails, and callers that do not read are no news."""
        return StringIO()


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """The running port. port: the one it listens on."""

    port: int
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        """Stops listening and waits for it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def serve_metrics(
    port: int,
    host: str = "127.0.0.1",
    *,
    registry: CollectorRegistry,
    pages: Mapping[str, Callable[[], Page]] | None = None,
    setting: str = "metrics_port",
) -> MetricsPort:
    """Serves `/metrics` of the registry, and `pages` by path, each made when asked for, on threads.

    port 0 takes any free one. Raises ConfigError, naming `setting`, if the port can not be had.
    """
    kind = _Server6 if ":" in host else _Server
    assert kind.address_family in (AF_INET, AF_INET6)
    try:
        server = kind((host, port), _Handler)
    except (OSError, OverflowError):
        raise ConfigError(
            f"{setting}: port {port} can not be listened on; is it in use? Choose another, or 0."
        ) from None
    server.set_app(_app(make_wsgi_app(registry), dict(pages or {})))
    thread = Thread(target=server.serve_forever, name=setting, daemon=True)
    thread.start()
    return MetricsPort(server.server_port, server, thread)


def _app(metrics: WSGIApplication, pages: Mapping[str, Callable[[], Page]]) -> WSGIApplication:
    def answer(environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        try:
            return asked(environ, start)
        except Exception:
            log.exception("a page of a metrics port failed")
            body = b"this could not be made; the log says why\n"
            return told(Page(body=body, status=HTTPStatus.INTERNAL_SERVER_ERROR), environ, start)

    def asked(environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "")
        if method not in ("GET", "HEAD"):
            page = Page(body=b"only GET\n", status=HTTPStatus.METHOD_NOT_ALLOWED)
        elif path == "/metrics":
            # As for any page, HEAD is the answer to GET without its body; the library knows GET alone.
            pieces = metrics({**environ, "REQUEST_METHOD": "GET"}, start)
            return pieces if method == "GET" else [b""]
        elif (make := pages.get(path)) is not None:
            page = make()
        else:
            page = Page(body=b"there is nothing here; see /metrics\n", status=HTTPStatus.NOT_FOUND)
        return told(page, environ, start)

    def told(page: Page, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        status = HTTPStatus(page.status)
        headers = [("Content-Type", page.content), ("Content-Length", str(len(page.body)))]
        start(f"{status.value} {status.phrase}", headers)
        return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else page.body]

    return answer
