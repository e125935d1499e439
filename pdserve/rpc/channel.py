"""Client channels: one set of options for everything that dials (router, workers, SDK)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

if TYPE_CHECKING:
    from pdserve.rpc.credentials import ChannelTls

MAX_MESSAGE_BYTES = 4 << 20
MAX_METADATA_BYTES = 8 << 10
KEEPALIVE_S = 4.0
"""A silent peer is noticed within about twice this (reliability.md: 10 s)."""

CONNECT_S, HANDSHAKE_S = 0.2, 5.0
"""How long a connection may take to come about, without and with TLS, which takes round trips and time."""


def channel_options(
    *, max_receive_bytes: int = MAX_MESSAGE_BYTES, connect_s: float = CONNECT_S
) -> list[tuple[str, int]]:
    """Options of a client channel: keepalive pings, quick reconnects, no proxy from the environment."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", int(connect_s * 1000)),  # the limit of one attempt
        ("grpc.max_reconnect_backoff_ms", 300),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def open_channel(
    address: str, *, max_receive_bytes: int = MAX_MESSAGE_BYTES, tls: ChannelTls | None = None
) -> grpc.aio.Channel:
    """An asyncio channel to host:port. Dials at the first call; close it with `await channel.close()`.

    tls: our certificate as it is now; a channel keeps it, so make a new one where a stream is opened anew.
    """
    options: Sequence[tuple[str, int | str]] = _options(address, max_receive_bytes, tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    from pdserve.rpc.credentials import channel_credentials

    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def open_blocking_channel(
    address: str, *, max_receive_bytes: int = MAX_MESSAGE_BYTES, tls: ChannelTls | None = None
) -> grpc.Channel:
    """A blocking channel to host:port, for the blocking client. tls: see `open_channel`."""
    options = _options(address, max_receive_bytes, tls)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    from pdserve.rpc.credentials import channel_credentials

    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def _options(address: str, max_receive_bytes: int, tls: ChannelTls | None) -> list[tuple[str, int | str]]:
    options: list[tuple[str, int | str]] = [
        *channel_options(
            max_receive_bytes=max_receive_bytes, connect_s=HANDSHAKE_S if tls is not None else CONNECT_S
        )
    ]
    if tls is not None:
        host = address.rpartition(":")[0]
        if tls.name_of(host) != host.strip("[]"):
            options.append(("grpc.ssl_target_name_override", tls.name_of(host)))
    return options
