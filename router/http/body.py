"""Request bodies: read under limits of size and time, then JSON, then a checked model.

What does not live here: the models (`schema`), and limits on values, which the hub checks.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from pdserve.errors import Cancelled, InvalidRequest
from router.http.errors import HttpRefused
from router.http.problems import problem
from router.http.schema.common import Body
from router.http.strict_json import load

MAX_BODY_BYTES = 4 << 20
MAX_DISCARDED_BYTES = 16 << 20
"""A body too large is read up to here and thrown away, so that its sender gets to read the answer."""
BODY_TIMEOUT_S = 30.0

M = TypeVar("M", bound=Body)


async def read(request: Request, kind: type[M]) -> M:
    """The body as a model. Raises InvalidRequest naming the field, HttpRefused, or Cancelled when the sender
    has gone."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HttpRefused(415, "Send the body with Content-Type: application/json.", close=True)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await _read_bytes(request)
    except TimeoutError:
        raise HttpRefused(408, f"The body took more than {BODY_TIMEOUT_S:g} s.", close=True) from None
    except ClientDisconnect:
        raise Cancelled("The client has gone.") from None
    return parse(load(raw), kind)


def parse(value: Any, kind: type[M]) -> M:
    """A JSON value as a model. Raises InvalidRequest naming the field."""
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise problem(error, value) from None


async def _read_bytes(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > MAX_DISCARDED_BYTES):
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            parts.append(part)
        elif size > MAX_DISCARDED_BYTES:
            break
        else:
            parts.clear()
    if size > MAX_BODY_BYTES:
        raise _too_large()
    return b"".join(parts)


def _too_large() -> HttpRefused:
    return HttpRefused(413, f"The body is larger than {MAX_BODY_BYTES >> 20} MB.", close=True)
