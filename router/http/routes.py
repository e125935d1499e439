"""Which path does what. A handler takes the gateway and a request; errors become its API's error objects.

What does not live here: bodies (`schema`), replies (one module for each API), the listener (`server`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import PdserveError, Unavailable
from router.http.answer import Answer
from router.http.body import read
from router.http.chat import chat_reply
from router.http.completions import completion_reply
from router.http.errors import ErrorForm, error_response, internal_error, openai_form
from router.http.gateway import Gateway
from router.http.generation import run
from router.http.schema.chat import ChatBody
from router.http.schema.common import Body
from router.http.schema.completions import CompletionBody
from router.http.strict_json import dump

log = logging.getLogger(__name__)

Handler = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path. body: what it takes. form: of its errors. open: served without a credential."""

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
    body: type[Body] | None = None
    form: ErrorForm = openai_form
    open: bool = False


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


async def _completions(gateway: Gateway, request: Request) -> Response:
    caller = gateway.caller(request)
    body = await read(request, CompletionBody)
    reply = completion_reply(body, gateway.name(body.model))
    inputs = body.inputs(gateway.label(request, body.user))
    return Answer(run(gateway.hub, inputs, caller), reply, openai_form)


async def _chat(gateway: Gateway, request: Request) -> Response:
    caller = gateway.caller(request)
    body = await read(request, ChatBody)
    reply = chat_reply(body, gateway.name(body.model))
    source = body.input(gateway.label(request, body.user))
    return Answer(run(gateway.hub, [source], caller), reply, openai_form)


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    context = gateway.info().limits.max_context
    return {
        "id": name, "object": "model", "created": gateway.started_s, "owned_by": "pdserve",
        "root": gateway.info().model, "max_model_len": context,
    }  # fmt: skip


async def _models(gateway: Gateway, request: Request) -> Response:
    gateway.caller(request)
    return json_response({"object": "list", "data": [_model(gateway, name) for name in gateway.names()]})


async def _one_model(gateway: Gateway, request: Request) -> Response:
    gateway.caller(request)
    return json_response(_model(gateway, gateway.name(request.path_params["model_id"])))


async def _health(gateway: Gateway, request: Request) -> Response:
    return json_response({"status": "ok"})


async def _ready(gateway: Gateway, request: Request) -> Response:
    if gateway.hub.draining or not gateway.hub.roster.is_ready():
        raise Unavailable("This router can not serve requests now.", retry_after_s=1.0)
    return json_response({"status": "ready"})


async def _metrics(gateway: Gateway, request: Request) -> Response:
    gateway.caller(request)
    text = generate_latest(gateway.hub.metrics.registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


ROUTES = (
    Route(path="/health", handler=_health, summary="Whether the process lives.", open=True),
    Route(path="/ready", handler=_ready, summary="Whether requests have a path.", open=True),
    Route(path="/metrics", handler=_metrics, summary="Prometheus metrics."),
    Route(path="/v1/models", handler=_models, summary="The names the model is served under."),
    Route(path="/v1/models/{model_id:path}", handler=_one_model, summary="One of them."),
    Route(
        path="/v1/completions", handler=_completions, summary="Goes on with texts.", method="POST",
        body=CompletionBody,
    ),
    Route(
        path="/v1/chat/completions", handler=_chat, summary="Answers a conversation.", method="POST",
        body=ChatBody,
    ),
)  # fmt: skip
