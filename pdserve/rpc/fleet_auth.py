"""Only members of the fleet may call the services between our processes: a token made from its secret.

What lives here: the token, the server's guard, and stubs that send it. What does not: authority over single
requests (tickets, `kvtransfer.ticket`) and clients' keys. The token proves possession of the secret to a peer
on the same host; between hosts it needs mutual TLS (docs/tls.md), which `--insecure` does without.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from pdserve.errors import Unauthenticated

METADATA_KEY = "pdserve-fleet"
PUBLIC_SERVICES = frozenset(
    {
        "pdserve.rpc.v1.InferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)
"""What clients and probes may call; everything else is between our own processes."""
_PURPOSE = b"pdserve internal rpc v1"

S = TypeVar("S")


def fleet_token(secret: bytes) -> str:
    """Hex of an HMAC-SHA256: tells nothing about the secret."""
    return hmac.digest(secret, _PURPOSE, "sha256").hex()


def authenticated(stub: S, secret: bytes) -> S:
    """The same stub; each of its calls carries the fleet's token."""
    metadata = ((METADATA_KEY, fleet_token(secret)),)
    for name, method in list(vars(stub).items()):
        setattr(stub, name, functools.partial(method, metadata=metadata))
    return stub


class FleetGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Denies calls of internal services that do not carry the fleet's token; compares in constant time."""

    def __init__(self, secret: bytes) -> None:
        self._token = fleet_token(secret)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        service = handler_call_details.method.strip("/").partition("/")[0]
        if service in PUBLIC_SERVICES or self._knows(handler_call_details):
            return await continuation(handler_call_details)
        # One kind of handler answers all kinds of calls: on the wire a denial is just a status.
        return grpc.unary_unary_rpc_method_handler(_deny, request_deserializer=bytes)

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        shown = [value for key, value in details.invocation_metadata or () if key == METADATA_KEY]
        return len(shown) == 1 and hmac.compare_digest(str(shown[0]).encode(), self._token.encode())


async def _deny(request: bytes, context: Any) -> None:
    raise Unauthenticated("This service is for members of the fleet; clients use InferenceService.")
