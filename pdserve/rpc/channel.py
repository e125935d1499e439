"""Client channels: one set of options for everything that dials (router, workers, SDK)."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 4 << 20
MAX_METADATA_BYTES = 8 << 10
KEEPALIVE_S = 4.0
"""A silent peer is noticed within about twice this (reliability.md: 10 s)."""


def channel_options(*, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a client channel: keepalive pings, quick reconnects, no proxy from the environment."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def open_channel(address: str, *, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """An asyncio channel to host:port. Dials at the first call; close it with `await channel.close()`."""
    options: Sequence[tuple[str, int]] = channel_options(max_receive_bytes=max_receive_bytes)
    return grpc.aio.insecure_channel(address, options=options)


def open_blocking_channel(address: str, *, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """A blocking channel to host:port, for the blocking client."""
    return grpc.insecure_channel(address, options=channel_options(max_receive_bytes=max_receive_bytes))
