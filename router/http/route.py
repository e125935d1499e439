"""What a route is, and how its handler is run: errors become error objects of its API.

What does not live here: the handlers, and the table of them (`routes`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import PdserveError
from router.http.errors import ErrorForm, error_response, internal_error, openai_form
from router.http.gateway import Gateway
from router.http.schema.common import Body
from router.http.strict_json import dump

log = logging.getLogger(__name__)

Handler = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path. body: what it takes. form: of its errors."""

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
    body: type[Body] | None = None
    form: ErrorForm = openai_form


def endpoint(gateway: Gateway, route: Route) -> Callable[[Request], Awaitable[Response]]:
    """The route's handler with its errors caught."""

    async def handle(request: Request) -> Response:
        try:
            return await route.handler(gateway, request)
        except PdserveError as error:
            return error_response(error, route.form)
        except Exception:
            log.exception("an HTTP request failed")
            return error_response(internal_error(), route.form)

    return handle


def json_response(value: Any, status: int = 200) -> Response:
    """A body of JSON."""
    return Response(dump(value), status, media_type="application/json")
