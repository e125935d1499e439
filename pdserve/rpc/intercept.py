"""Server interceptor that turns exceptions into statuses: ours with details, others neutral and logged."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.errors import InternalError, InvalidRequest, PdserveError
from pdserve.rpc.status import code_of, trailers_of

log = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler; its attributes are not typed
Context = grpc.aio.ServicerContext[Any, Any]

_WRAPPED = (
    ("unary_unary", grpc.unary_unary_rpc_method_handler),
    ("unary_stream", grpc.unary_stream_rpc_method_handler),
    ("stream_unary", grpc.stream_unary_rpc_method_handler),
    ("stream_stream", grpc.stream_stream_rpc_method_handler),
)


class _Unreadable:
    """Stands for a request that could not be parsed: left to itself, grpc answers with reprs of internals."""


async def _fail(context: Context, error: PdserveError) -> None:
    """Ends the call with the status of `error`.

    To be called where the request is held no more: gRPC keeps what a call was aborted with, all its frames
    included, until Python's collector comes, and a request can have many megabytes.
    """
    await context.abort(code_of(error), error.message, trailers_of(error))


def _ours(error: Exception) -> PdserveError:
    """What the client is told, without frames; what is not ours is logged first."""
    if isinstance(error, DecodeError):
        error = InvalidRequest("The request is not a message of this protocol; update the client.")
    if not isinstance(error, PdserveError):
        log.error("a call failed unexpectedly", exc_info=error)
        error = InternalError("The server failed on this request; its log has the details.")
    return error.with_traceback(None)


def _guard(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of any of the four kinds, written as a coroutine or as an async generator."""
    if inspect.isasyncgenfunction(method):
        return _guard_generator(method)
    return _guard_coroutine(method)


def _guard_coroutine(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            _check(request)
            return await method(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            failure = _ours(error)
        del request
        return await _fail(context, failure)

    return guarded


def _guard_generator(method: Callable[..., AsyncGenerator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            _check(request)
            async with contextlib.aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response
            return
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            failure = _ours(error)
        del request
        await _fail(context, failure)

    return guarded


def _check(request: Any) -> None:
    if isinstance(request, _Unreadable):
        raise DecodeError


def rebuilt(
    handler: Handler, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, parse: Any
) -> Handler:
    """The same kind of handler around a wrapped method. parse: of requests; None leaves them as bytes."""
    for name, build in _WRAPPED:
        method = getattr(handler, name)
        if method is not None:
            return build(
                wrap(method), request_deserializer=parse, response_serializer=handler.response_serializer
            )
    return handler


def _lenient(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer of single requests whose failure is seen by the guard."""
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Unreadable()

    return parsed


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Every handler's exceptions become statuses here; no handler needs its own translation."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer
        # A stream's messages are parsed inside the handler, where the guard sees the error.
        return rebuilt(handler, _guard, parse=parse if handler.request_streaming else _lenient(parse))
