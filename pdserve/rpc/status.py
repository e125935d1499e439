"""PdserveError ↔ gRPC status with google.rpc details, one table both ways.

ErrorInfo carries our stable label (domain "pdserve"), BadRequest the field violations, RetryInfo the retry
hint. Errors that did not come from our own code (a broken connection, a message over the limit) are mapped by
their status code, with a neutral message: texts of the transport name addresses and never reach a user.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from pdserve.errors import (
    BY_LABEL,
    Cancelled,
    DeadlineExpired,
    FieldViolation,
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    PermissionRefused,
    Unauthenticated,
    Unavailable,
    UnknownRequest,
    UnsupportedFeature,
)
from pdserve.rpc.v1 import details_pb2

DOMAIN = "pdserve"
DETAILS_KEY = "grpc-status-details-bin"
_PREFIX = "type.googleapis.com/google.rpc."
_MAX_RETRY_S = 3600.0

_BY_CODE: dict[grpc.StatusCode, tuple[type[PdserveError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        Unavailable,
        "The server can not be reached. Is it running, with TLS as we have it? Try again.",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExpired, "The deadline passed before the answer was there."),
    grpc.StatusCode.CANCELLED: (Cancelled, "The call was cancelled."),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (Overloaded, "The server or the message is over a limit."),
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequest, "The server did not understand the request."),
    grpc.StatusCode.NOT_FOUND: (UnknownRequest, "The server does not know what was asked for."),
    grpc.StatusCode.UNAUTHENTICATED: (Unauthenticated, "The server wants other credentials."),
    grpc.StatusCode.PERMISSION_DENIED: (PermissionRefused, "These credentials may not do this."),
    grpc.StatusCode.UNIMPLEMENTED: (UnsupportedFeature, "The server does not offer this call."),
}
_TOO_LARGE = "larger than max"
_UNTRUSTED = ("andshake failed", "erification")  # gRPC's words on TLS, whatever their case

M = TypeVar("M", bound=Message)


def code_of(error: PdserveError) -> grpc.StatusCode:
    """The one gRPC status of an error."""
    return grpc.StatusCode[error.status]


def rich_status(error: PdserveError) -> details_pb2.RichStatus:
    """The error as google.rpc.Status: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    out = details_pb2.RichStatus(code=int(code_of(error).value[0]), message=error.message)
    _pack(out, "ErrorInfo", details_pb2.ErrorInfo(reason=error.label, domain=DOMAIN))
    if error.violations:
        bad = details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        _pack(out, "BadRequest", bad)
    if error.retry_after_s is not None:
        retry = details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(1000 * min(max(error.retry_after_s, 0.0), _MAX_RETRY_S)))
        _pack(out, "RetryInfo", retry)
    return out


def _pack(out: details_pb2.RichStatus, name: str, detail: Message) -> None:
    out.details.add(type_url=_PREFIX + name, value=detail.SerializeToString())


def trailers_of(error: PdserveError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the details of an error."""
    return ((DETAILS_KEY, rich_status(error).SerializeToString()),)


def error_from_trailers(
    code: grpc.StatusCode, trailers: Iterable[tuple[str, str | bytes]] | None, text: str = ""
) -> PdserveError:
    """The error behind a failed call. Never fails: unreadable details leave what the code says.

    text: the transport's own words; only looked at, never shown.
    """
    for key, value in trailers or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            found = _from_details(value)
            if found is not None:
                return found
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
        return InvalidRequest("The message is over the server's size limit (4 MB): send a shorter prompt.")
    if code is grpc.StatusCode.UNAVAILABLE and any(word in text for word in _UNTRUSTED):
        return Unavailable("TLS with the server failed: its certificate or ours does not fit; check tls_ca.")
    cls, message = _BY_CODE.get(code, (InternalError, "The server failed on this request."))
    return cls(message)


def error_from_rpc(error: grpc.RpcError) -> PdserveError:
    """The error behind a grpc.RpcError of a blocking or an asyncio call."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError("The call failed.")
    trailers = cast("Iterable[tuple[str, str | bytes]] | None", error.trailing_metadata())
    return error_from_trailers(error.code(), trailers, error.details() or "")


def error_from_label(label: str, message: str, *, retry_after_s: float | None = None) -> PdserveError:
    """The error a worker named in a message. An unknown label becomes InternalError."""
    return BY_LABEL.get(label, InternalError)(message, retry_after_s=retry_after_s)


def _from_details(value: bytes) -> PdserveError | None:
    try:
        status = details_pb2.RichStatus.FromString(value)
        return _from_status(status)
    except DecodeError:
        return None


def _from_status(status: details_pb2.RichStatus) -> PdserveError | None:
    info = _find(status, "ErrorInfo", details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        return None
    bad = _find(status, "BadRequest", details_pb2.BadRequest)
    violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations) if bad else ()
    retry = _find(status, "RetryInfo", details_pb2.RetryInfo)
    seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if retry is not None else None
    cls = BY_LABEL.get(info.reason, InternalError)
    return cls(status.message, violations=violations, retry_after_s=seconds)


def _find(status: details_pb2.RichStatus, name: str, cls: type[M]) -> M | None:
    for detail in status.details:
        if detail.type_url == _PREFIX + name:
            return cls.FromString(detail.value)
    return None
