"""gRPC credentials from our identity: servers take new certificates at each handshake, channels when made.

What lives here: the translation, and channels that are made anew when the certificate changed. What does not:
files and contexts (`pdserve.tls`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc
import grpc.aio

from pdserve.tls import TlsSource
from pdserve.tls.contexts import Identity

C = TypeVar("C")


class ChannelIdentity(Protocol):
    """What a channel shows and trusts, in PEM. cert and key None: we show nothing."""

    @property
    def ca(self) -> bytes: ...
    @property
    def cert(self) -> bytes | None: ...
    @property
    def key(self) -> bytes | None: ...


class ChannelTls(Protocol):
    """Where a channel's identity comes from: `TlsSource`, or `Authorities` without a certificate of ours."""

    def versioned(self) -> tuple[int, ChannelIdentity]:
        """The newest, with a number that grows with each change."""

    def name_of(self, host: str) -> str:
        """What the certificate of `host` must cover."""


RETIRED_S = 660.0
"""How long a channel with an old certificate is kept for its running calls: the longest deadline and more."""


def server_credentials(tls: TlsSource) -> grpc.ServerCredentials:
    """Every client must show a certificate of our authority; changed files count from the next handshake."""
    version, identity = tls.versioned()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal version
        before = version
        version, now = tls.versioned()
        return None if version == before else _configuration(now)

    return grpc.dynamic_ssl_server_credentials(_configuration(identity), fetch, True)  # type: ignore[arg-type]


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)


def channel_credentials(tls: ChannelTls) -> grpc.ChannelCredentials:
    """Our certificate as it is now, if we have one, and the authorities we trust."""
    _, identity = tls.versioned()
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.cert)


class Renewing(Generic[C]):
    """Something made from a channel, made anew when our certificate has changed; the old one stays a while
    for the calls that run on it. Without TLS it is made once. For one thread, or under the caller's lock."""

    def __init__(self, tls: ChannelTls | None, make: Callable[[], C], close: Callable[[C], object]) -> None:
        """make: a new one, with the certificate of now. close: called when no call can run on it any more."""
        self._tls, self._make, self._close = tls, make, close
        self._version = tls.versioned()[0] if tls is not None else 0
        self._now = make()
        self._retired: list[tuple[float, C]] = []

    def current(self) -> C:
        """The one for new calls."""
        if self._tls is not None:
            version, _ = self._tls.versioned()
            if version != self._version:
                self._version = version
                self._replace(time.monotonic())
        return self._now

    def _replace(self, now: float) -> None:
        self._retired.append((now + RETIRED_S, self._now))
        self._now = self._make()
        for _, old in [entry for entry in self._retired if entry[0] <= now]:
            self._close(old)
        self._retired = [entry for entry in self._retired if entry[0] > now]

    def all(self) -> list[C]:
        """Everything that is open, for closing."""
        return [self._now, *(made for _, made in self._retired)]


_closing: set[asyncio.Task[None]] = set()


def close_soon(channel: grpc.aio.Channel) -> None:
    """Closes a channel of the running loop, without waiting for it."""
    task = asyncio.get_running_loop().create_task(channel.close(None))
    _closing.add(task)
    task.add_done_callback(_closing.discard)
