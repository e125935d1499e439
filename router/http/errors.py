"""PdserveErrors as HTTP: a status, the headers that go with it, and a body in the form of the route's API.

What does not live here: what is wrong with a request (`body`, `schema`, the hub).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.responses import Response

from pdserve.errors import InternalError, InvalidRequest, PdserveError, UnsupportedFeature
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
_NAMES = {"tokens": "prompt", "input": "prompt"}
_RESPONSES_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs",
    "grammar": "text.format",
}  # fmt: skip
_ANTHROPIC_NAMES = {"stop": "stop_sequences"}
_GRPC_PREFIX = re.compile(r"^(sampling|chat)\.")
_INTERNAL = InternalError("Something went wrong in the server; the request was not carried out.")
_RETRY = frozenset({429, 503})


class HttpRefused(InvalidRequest):
    """A request refused for what HTTP itself says of it. status_code: 4xx. close: its body was not read."""

    def __init__(self, status_code: int, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status_code, self.close = status_code, close


class WrongBody(InvalidRequest):
    """A field of the body that is wrong: named as the client named it, so the name is told as it is."""


class UnsupportedField(UnsupportedFeature):
    """A field of the body, or a value of it, that we do not have; named as the client named it."""


def status_of(error: PdserveError) -> int:
    """The HTTP status of an error; 500 for whatever is not the caller's or the fleet's business."""
    if isinstance(error, HttpRefused):
        return error.status_code
    return _STATUS.get(error.status, 500)


def openai_form(error: PdserveError, names: Mapping[str, str] = _NAMES) -> Mapping[str, Any]:
    """`{"error": {message, type, param, code}}`. code: our stable label. names: of gRPC's fields, where the
    route has others."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "internal_server_error"
    message, param = _told(error, status, names)
    kind = _OPENAI_TYPES.get(status, usual)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.label}}


def anthropic_form(error: PdserveError) -> Mapping[str, Any]:
    """`{"type": "error", "error": {type, message}}`."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "api_error"
    message, _ = _told(error, status, _ANTHROPIC_NAMES)
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, usual), "message": message}}


responses_form = partial(openai_form, names=_RESPONSES_NAMES)
embeddings_form = partial(openai_form, names={"inputs": "input"})
detokenize_form = partial(openai_form, names={"ids": "tokens"})


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


def _told(error: PdserveError, status: int, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Message and field, with the name that the field has in the route's bodies."""
    if status == 500:
        return _INTERNAL.message, None
    if not error.violations:
        return error.message, None
    wrong = error.violations[0]
    if isinstance(error, WrongBody | UnsupportedField):
        return error.message, wrong.field
    name = _GRPC_PREFIX.sub("", wrong.field)
    name = names.get(name, name)
    return f"{name}: {wrong.description}", name
