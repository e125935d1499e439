"""The interceptor that asks before every call: nothing is served that the table of access does not allow.

What lives here: denying, and admitting a caller before a byte of its request is parsed. What does not: the
table (`access`), the fleet's token (`fleet_auth`), and who clients are (the server that has some brings it).
"""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from pdserve.errors import PdserveError, PermissionRefused, Unauthenticated
from pdserve.rpc.access import RULES, Access
from pdserve.rpc.fleet_auth import METADATA_KEY, fleet_token
from pdserve.rpc.intercept import Context, Handler, rebuilt

Metadata = tuple[tuple[str, str | bytes], ...]
_FLEET_ONLY = Unauthenticated("This service is for members of the fleet; clients use InferenceService.")
_NO_RULE = PermissionRefused("This call is not open to anybody.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A client's call. peer: address as gRPC names it. of_fleet: it carries the fleet's token."""

    method: str
    access: Access
    metadata: Metadata
    peer: str
    of_fleet: bool


class Clients(Protocol):
    """Those who call from outside the fleet, as a server knows them."""

    def admit(self, call: Call) -> AbstractContextManager[Callable[[Any], None]]:
        """Around one call of access client or admin. Gives what is to be told the parsed request.

        Raises Unauthenticated, PermissionRefused or Overloaded when it begins.
        """


class AccessGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Denies by default. clients: None for servers that our own processes alone may call."""

    def __init__(self, secret: bytes, clients: Clients | None = None) -> None:
        """secret: the fleet's."""
        self._token, self._clients = fleet_token(secret).encode(), clients

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        access = RULES.get(handler_call_details.method)
        if access is Access.FLEET:
            return handler if self._of_fleet(handler_call_details) else _deny(_FLEET_ONLY)
        if handler is None or access is Access.PUBLIC:
            return handler
        if access is None:
            return _deny(_NO_RULE)
        if self._clients is None:
            return handler if self._of_fleet(handler_call_details) else _deny(_FLEET_ONLY)
        return self._admitting(self._clients, handler, access, handler_call_details)

    def _of_fleet(self, details: grpc.HandlerCallDetails) -> bool:
        shown = [value for key, value in details.invocation_metadata or () if key == METADATA_KEY]
        return len(shown) == 1 and hmac.compare_digest(str(shown[0]).encode(), self._token)

    def _admitting(
        self, clients: Clients, handler: Handler, access: Access, details: grpc.HandlerCallDetails
    ) -> Handler:
        """The same handler; it admits its caller first and parses its request itself."""
        parse, streams = handler.request_deserializer, handler.request_streaming
        metadata: Metadata = tuple((key, value) for key, value in details.invocation_metadata or ())

        def admit(context: Context) -> AbstractContextManager[Callable[[Any], None]]:
            call = Call(
                method=details.method, access=access, metadata=metadata, peer=context.peer(),
                of_fleet=self._of_fleet(details),
            )  # fmt: skip
            return clients.admit(call)

        def opened(raw: Any, told: Callable[[Any], None]) -> Any:
            if streams:
                return _each(parse, raw)
            request = parse(raw)
            told(request)
            return request

        return rebuilt(handler, lambda method: _around(method, admit, opened), parse=None)


def _around(
    method: Callable[..., Any],
    admit: Callable[[Context], AbstractContextManager[Callable[[Any], None]]],
    opened: Callable[[Any, Callable[[Any], None]], Any],
) -> Callable[..., Any]:
    """A method of either kind, within the admission of its caller."""

    async def generator(raw: Any, context: Context) -> AsyncIterator[Any]:
        with admit(context) as told:
            async with aclosing(method(opened(raw, told), context)) as responses:
                async for response in responses:
                    yield response

    async def coroutine(raw: Any, context: Context) -> Any:
        with admit(context) as told:
            return await method(opened(raw, told), context)

    return generator if inspect.isasyncgenfunction(method) else coroutine


async def _each(parse: Callable[[bytes], Any], messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield parse(message)


def _deny(error: PdserveError) -> Handler:
    """One kind of handler answers all kinds of calls: on the wire a denial is just a status."""

    async def denied(request: bytes, context: Context) -> None:
        raise type(error)(error.message)

    return grpc.unary_unary_rpc_method_handler(denied, request_deserializer=bytes)
