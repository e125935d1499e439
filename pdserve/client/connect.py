"""A client's connection: its channel and stub, made anew when its certificate has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from pdserve.rpc.credentials import Renewing
    from pdserve.tls import TlsSource


class TlsOptions(TypedDict, total=False):
    """PEM files: authorities to trust, our certificate, its key. tls_server_name: what the router's
    certificate must cover, if not the host of the address. Give the three files, or none for no TLS."""

    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_server_name: str


class Connection:
    """A channel and the stub on it."""

    def __init__(self, channel: Any) -> None:
        from pdserve.rpc.v1.inference_pb2_grpc import InferenceServiceStub

        self.channel = channel
        self.stub: Any = InferenceServiceStub(channel)


def connections(
    options: TlsOptions, open_channel: Callable[[TlsSource | None], Any], close: Callable[[Any], object]
) -> Renewing[Connection]:
    """The connections of one client, one after the other. Raises ConfigError for files that do not do."""
    from pdserve.rpc.credentials import Renewing

    tls = _source(options)
    return Renewing(tls, lambda: Connection(open_channel(tls)), lambda connection: close(connection.channel))


def _source(options: TlsOptions) -> TlsSource | None:
    if not any(options.values()):
        return None  # ssl need not be loaded
    from pdserve.tls import TlsFiles, TlsSource

    files = TlsFiles.of(
        options.get("tls_ca", ""),
        options.get("tls_cert", ""),
        options.get("tls_key", ""),
        options.get("tls_server_name", ""),
    )
    return None if files is None else TlsSource(files, serves=False)
