"""The application: routes, what is said of paths that are none, its OpenAPI page, limits before all of it.

FastAPI's pages for browsers are off: they load scripts from elsewhere. The one we have is our own
(`status_page`).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from router.http.errors import HttpRefused, error_response, openai_form
from router.http.gateway import Gateway
from router.http.guard import Guard
from router.http.route import Route, endpoint, json_response
from router.http.routes import ROUTES, package_version
from router.http.status_page import status_routes

_PAGE = "/openapi.json"
_REF = "#/components/schemas/{model}"
_NOT_FOUND = {404: "There is nothing at this path.", 405: "This path does not take that method."}


def application(gateway: Gateway) -> ASGIApp:
    """Everything behind the listener."""
    app = FastAPI(title="pdserve", version=package_version(), openapi_url=None, redirect_slashes=False)
    for route in ROUTES:
        app.add_api_route(
            route.path,
            endpoint(gateway, route),
            methods=[route.method],
            summary=route.summary,
            response_model=None,
            responses=_responses(route),
            openapi_extra=_extra(route),
        )
    app.add_exception_handler(HTTPException, _no_route)
    page = app.openapi
    app.openapi = lambda: _with_bodies(page())  # type: ignore[method-assign]
    for route in status_routes(gateway):
        app.add_api_route(route.path, endpoint(gateway, route), include_in_schema=False)
    app.add_api_route(_PAGE, endpoint(gateway, _page_route(app)), include_in_schema=False)
    return Guard(app)


def _page_route(app: FastAPI) -> Route:
    """FastAPI's own route of its page asks nobody for a key."""

    async def handle(gateway: Gateway, request: Request) -> Response:
        gateway.caller(request)
        return json_response(app.openapi())

    return Route(path=_PAGE, handler=handle, summary="This page.")


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refused = HttpRefused(status, _NOT_FOUND.get(status, "The request can not be served."))
    response = error_response(refused, openai_form)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _extra(route: Route) -> dict[str, Any]:
    if route.body is None:
        return {}
    schema = {"$ref": _REF.format(model=route.body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    return {"4XX": {"description": "The request is refused."}, "5XX": {"description": "Try again later."}}


def _with_bodies(page: dict[str, Any]) -> dict[str, Any]:
    """The page with the schemas of bodies, which we read ourselves."""
    bodies = [(route.body, "validation") for route in ROUTES if route.body is not None]
    _, made = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    page.setdefault("components", {}).setdefault("schemas", {}).update(made.get("$defs", {}))
    return page
