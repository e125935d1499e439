"""A client's routers and how to reach them: addresses, certificates, key, retries. The same for both clients.

What lives here: what is needed to make a call, short of making it. What does not: waiting for anything.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from pdserve.client.metadata import (
    Metadata,
    MetadataLike,
    check_secret,
    metadata_of,
    trace_metadata,
)
from pdserve.client.pool import Endpoint, Pool
from pdserve.client.retry import Retry, Tries
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.rpc.credentials import ChannelTls, Renewing

MAX_ROUTERS = 256


class TlsOptions(TypedDict, total=False):
    """PEM files: authorities to trust, our certificate, its key. tls_server_name: what the router's
    certificate must cover, if not the host of the address. tls_ca alone: we show no certificate."""

    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_server_name: str


class ClientOptions(TlsOptions, total=False):
    """Options of a client. api_key: sent with every call as a bearer token. metadata: more to send with every
    call. insecure: send the key without TLS beyond this machine. retry: None makes each call once."""

    api_key: str
    metadata: MetadataLike
    insecure: bool
    retry: Retry | None


class Connection:
    """A channel and the stub on it."""

    def __init__(self, channel: Any) -> None:
        from pdserve.rpc.v1.inference_pb2_grpc import InferenceServiceStub

        self.channel = channel
        self.stub: Any = InferenceServiceStub(channel)


class Routers:
    """The pool of one client, with what goes with each call."""

    def __init__(
        self,
        address: str | Sequence[str],
        options: ClientOptions,
        open_channel: Callable[[str, ChannelTls | None], Any],
        close: Callable[[Any], object],
    ) -> None:
        """Raises ConfigError."""
        addresses = addresses_of(address)
        unknown = sorted(set(options) - ClientOptions.__annotations__.keys())
        if unknown:
            raise ConfigError(f"{unknown[0]}: is no option of a client; see ClientOptions")
        tls = _source(options)
        self.metadata = metadata_of(options.get("api_key", ""), options.get("metadata", ()))
        insecure = options.get("insecure", False)
        check_secret(addresses, self.metadata, encrypted=tls is not None, insecure=insecure)
        self._retry = options.get("retry", Retry()) or Retry(attempts=1)
        self._lock = threading.Lock()
        self._links = [_link(each, tls, open_channel, close) for each in addresses]
        self.pool = Pool(
            [
                Endpoint(each, partial(self._stub, link))
                for each, link in zip(addresses, self._links, strict=True)
            ]
        )

    def _stub(self, link: Renewing[Connection]) -> Any:
        with self._lock:
            return link.current().stub

    def tries(self, deadline_s: float, *, only: Endpoint | None = None, repeats: bool = True) -> Tries:
        """The tries of one call. See Tries."""
        return Tries(
            pool=self.pool,
            retry=self._retry,
            deadline_at=time.monotonic() + deadline_s,
            clock=time.monotonic,
            chance=random.random,
            only=only,
            repeats=repeats,
        )

    def sent_with(self) -> Metadata:
        """The metadata of a call made now."""
        names = {name for name, _ in self.metadata}
        return (*self.metadata, *(pair for pair in trace_metadata() if pair[0] not in names))

    def channels(self) -> list[Any]:
        """Everything that is open, for closing."""
        with self._lock:
            return [connection.channel for link in self._links for connection in link.all()]


def _link(
    address: str,
    tls: ChannelTls | None,
    open_channel: Callable[[str, ChannelTls | None], Any],
    close: Callable[[Any], object],
) -> Renewing[Connection]:
    """The connections to one router, one after the other."""
    from pdserve.rpc.credentials import Renewing

    def make() -> Connection:
        return Connection(open_channel(address, tls))

    return Renewing(tls, make, lambda connection: close(connection.channel))


def addresses_of(address: str | Sequence[str]) -> tuple[str, ...]:
    """host:port of each router: a list, or a text with commas. Raises ConfigError."""
    texts = address.split(",") if isinstance(address, str) else address
    found = tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if not 1 <= len(found) <= MAX_ROUTERS or not all(map(_is_target, found)):
        raise ConfigError(f"address: name 1 to {MAX_ROUTERS} routers as host:port")
    return found


def _is_target(address: str) -> bool:
    """Whether gRPC can connect there: to the HTTP API's URL, or without a port, it would try in vain."""
    if "/" in address or address.startswith("unix"):
        return not address.startswith(("http://", "https://"))
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def _source(options: TlsOptions) -> ChannelTls | None:
    names = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
    if not any(options.get(name) for name in names):
        return None  # ssl need not be loaded
    from pdserve.tls import TlsFiles, TlsSource

    ca, cert, key, name = (str(options.get(each, "")) for each in names)
    if ca and not cert and not key:
        from pdserve.tls.authorities import Authorities

        return Authorities(ca, name)
    files = TlsFiles.of(ca, cert, key, name)
    return None if files is None else TlsSource(files, serves=False)
