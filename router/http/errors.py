"""PdserveErrors as HTTP: a status, the headers that go with it, and a body in the form of the route's API.

What does not live here: what is wrong with a request (`body`, `schema`, the hub).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from pdserve.errors import InternalError, InvalidRequest, PdserveError
from router.http.strict_json import dump

ErrorForm = Callable[[PdserveError], Mapping[str, Any]]
"""An error's body, as an API writes it."""

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNIMPLEMENTED": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": 499,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
}
_OPENAI_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_RENAMED = {"tokens": "prompt", "input": "prompt", "chat.messages": "messages"}
_GRPC_PREFIX = re.compile(r"^(sampling|chat)\.")
_INTERNAL = InternalError("Something went wrong in the server; the request was not carried out.")
_RETRY = frozenset({429, 503})


class HttpRefused(InvalidRequest):
    """A request refused for what HTTP itself says of it. status_code: 4xx. close: its body was not read."""

    def __init__(self, status_code: int, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status_code, self.close = status_code, close


def status_of(error: PdserveError) -> int:
    """The HTTP status of an error; 500 for whatever is not the caller's or the fleet's business."""
    if isinstance(error, HttpRefused):
        return error.status_code
    return _STATUS.get(error.status, 500)


def openai_form(error: PdserveError) -> Mapping[str, Any]:
    """`{"error": {message, type, param, code}}`. code: our stable label."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "internal_server_error"
    message, param = _told(error, status)
    kind = _OPENAI_TYPES.get(status, usual)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.label}}


def anthropic_form(error: PdserveError) -> Mapping[str, Any]:
    """`{"type": "error", "error": {type, message}}`."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "api_error"
    message, _ = _told(error, status)
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, usual), "message": message}}


def error_response(error: PdserveError, form: ErrorForm) -> Response:
    """The whole response. Retry-After: whole seconds, where a retry makes sense."""
    status = status_of(error)
    headers = {}
    if status in _RETRY:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HttpRefused) and error.close:
        headers["connection"] = "close"
    return Response(dump(form(error)), status, headers, "application/json")


def internal_error() -> PdserveError:
    """What a caller hears of a defect of ours: no details."""
    return _INTERNAL


def _told(error: PdserveError, status: int) -> tuple[str, str | None]:
    """Message and field, with the names that HTTP's fields have."""
    if status == 500:
        return _INTERNAL.message, None
    if not error.violations:
        return error.message, None
    wrong = error.violations[0]
    name = _GRPC_PREFIX.sub("", _RENAMED.get(wrong.field, wrong.field))
    return f"{name}: {wrong.description}", name
