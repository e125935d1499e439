"""What is sent beside a request: the API key, the user's own headers, and the trace it belongs to.

OpenTelemetry is asked only where the program has loaded it: without that there is no span to tell of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from pdserve.errors import ConfigError

Metadata = tuple[tuple[str, str], ...]
MetadataLike = Mapping[str, str] | Sequence[tuple[str, str]]

AUTHORIZATION = "authorization"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


def metadata_of(api_key: str, more: MetadataLike) -> Metadata:
    """What goes with every call. Raises ConfigError for what gRPC can not send; it never shows a value."""
    pairs = [*(more.items() if isinstance(more, Mapping) else more)]
    for name, value in pairs:
        reserved = name.startswith("grpc-") or name.endswith("-bin")
        if not name or reserved or not set(name) <= _NAME or not _printable(value):
            raise ConfigError(
                "metadata: names have lower-case letters, digits, -, _ and ., and do not begin with grpc- "
                "or end in -bin; values are printable ASCII"
            )
    if not api_key:
        return tuple(pairs)
    if not _printable(api_key) or " " in api_key:
        raise ConfigError("api_key: must be printable ASCII without spaces")
    if any(name == AUTHORIZATION for name, _ in pairs):
        raise ConfigError("api_key: give this or an authorization header in metadata, not both")
    return ((AUTHORIZATION, f"Bearer {api_key}"), *pairs)


def _printable(value: str) -> bool:
    return value.isascii() and value.isprintable()


def check_secret(addresses: Iterable[str], metadata: Metadata, *, encrypted: bool, insecure: bool) -> None:
    """Raises ConfigError where a key would go over a network in the clear."""
    if encrypted or insecure or not any(name == AUTHORIZATION for name, _ in metadata):
        return
    from pdserve.config.addresses import is_loopback

    if not all(is_loopback(address.rpartition(":")[0].strip("[]")) for address in addresses):
        raise ConfigError(
            "api_key: a key is not sent without TLS beyond this machine: give tls_ca, "
            "or insecure=True on a network you trust"
        )


def trace_metadata() -> Metadata:
    """W3C traceparent (and tracestate) of the current span; empty without one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ()
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    flags = int(context.trace_flags)
    found = [("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}")]
    if context.trace_state:
        found.append(("tracestate", context.trace_state.to_header()))
    return tuple(found)


def trace_id_of(metadata: Metadata) -> str:
    """The trace id in a traceparent; empty without one."""
    return next((value.split("-")[1] for name, value in metadata if name == "traceparent"), "")
