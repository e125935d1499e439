"""Options of every command that calls a router: its address, and who we are. Loads no gRPC."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from pdserve.cli.connection import Router
    from pdserve.client.connect import ClientOptions

KEY_VARIABLE = "PDSERVE_API_KEY"
Address = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="Address of the router.")]
TlsCa = Annotated[
    str, typer.Option(metavar="FILE", envvar="PDSERVE_TLS_CA", help="Authorities to trust (PEM): use TLS.")
]
TlsCert = Annotated[
    str, typer.Option(metavar="FILE", envvar="PDSERVE_TLS_CERT", help="Our certificate (PEM).")
]
TlsKey = Annotated[str, typer.Option(metavar="FILE", envvar="PDSERVE_TLS_KEY", help="Its private key (PEM).")]
TlsName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        envvar="PDSERVE_TLS_SERVER_NAME",
        help="Name in the router's certificate, if not its host.",
    ),
]


def router_at(address: str, ca: str, cert: str, key: str, name: str) -> Router:
    """The router that these options name, called with the key of $PDSERVE_API_KEY if there is one: others on
    the machine could read it on a command line. Raises nothing: it is not called yet."""
    from pdserve.cli.connection import Router

    options = {"tls_ca": ca, "tls_cert": cert, "tls_key": key, "tls_server_name": name}
    options["api_key"] = os.environ.get(KEY_VARIABLE, "")
    return Router(address=address, options=cast("ClientOptions", options))
