"""The HTTP side of a router, whole: application and listener, where the configuration asks for them.

Only this module is imported where the extra `http` may be missing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from router.config import RouterConfig

if TYPE_CHECKING:
    from pdserve.tls import TlsSource
    from router.http.gateway import Authenticate
    from router.http.server import HttpServer
    from router.hub import Hub

_PACKAGES = ("fastapi", "uvicorn")


def http_server(
    config: RouterConfig, hub: Hub, tls: TlsSource | None, authenticate: Authenticate
) -> HttpServer | None:
    """The server to start; None where HTTP is off. Raises ConfigError if it is on and can not be."""
    installed = all(find_spec(name) is not None for name in _PACKAGES)
    if config.http is False or (config.http is None and not installed):
        return None
    if not installed:
        raise ConfigError("http: needs more packages: pip install 'pdserve[http]'")
    from router.http.app import application
    from router.http.gateway import Gateway
    from router.http.server import HttpServer

    gateway = Gateway(hub, config.served_model_name, authenticate)
    return HttpServer(
        application(gateway), host=config.host, port=config.http_port, insecure=config.insecure, tls=tls
    )
