"""Which path does what: the table of all routes, and the handlers of those that only look.

What does not live here: bodies (`schema`), replies (one module for each API), the listener (`server`).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import Unavailable
from router.http import chat, completions, messages, responses, text_routes
from router.http.errors import anthropic_form, detokenize_form, embeddings_form, responses_form
from router.http.gateway import Gateway
from router.http.route import Route, json_response
from router.http.schema import texts
from router.http.schema.chat import ChatBody
from router.http.schema.completions import CompletionBody
from router.http.schema.messages import CountBody, MessagesBody
from router.http.schema.responses import ResponsesBody


def package_version() -> str:
    """Of pdserve; "0" where it is not installed but lies in the path."""
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "0"


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
    if not gateway.hub.ready:
        raise Unavailable("This router can not serve requests now.", retry_after_s=1.0)
    return json_response({"status": "ready"})


async def _metrics(gateway: Gateway, request: Request) -> Response:
    gateway.caller(request)
    text = generate_latest(gateway.hub.metrics.registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _version(gateway: Gateway, request: Request) -> Response:
    gateway.caller(request)
    return json_response({"version": package_version()})


ROUTES = (
    Route(path="/health", handler=_health, summary="Whether the process lives."),
    Route(path="/ready", handler=_ready, summary="Whether requests have a path."),
    Route(path="/metrics", handler=_metrics, summary="Prometheus metrics."),
    Route(path="/version", handler=_version, summary="Which pdserve this is."),
    Route(path="/v1/models", handler=_models, summary="The names the model is served under."),
    Route(path="/v1/models/{model_id:path}", handler=_one_model, summary="One of them."),
    Route(
        path="/v1/completions", handler=completions.handle, summary="Goes on with texts.",
        method="POST", body=CompletionBody,
    ),
    Route(
        path="/v1/chat/completions", handler=chat.handle, summary="Answers a conversation.",
        method="POST", body=ChatBody,
    ),
    Route(
        path="/v1/responses", handler=responses.handle, summary="Answers items; nothing is kept.",
        method="POST", body=ResponsesBody, form=responses_form,
    ),
    Route(
        path="/v1/messages", handler=messages.handle, summary="Answers a conversation, in Anthropic's form.",
        method="POST", body=MessagesBody, form=anthropic_form,
    ),
    Route(
        path="/v1/messages/count_tokens", handler=messages.count, summary="How many tokens it would have.",
        method="POST", body=CountBody, form=anthropic_form,
    ),
    Route(
        path="/v1/embeddings", handler=text_routes.embed, summary="Vectors of texts.",
        method="POST", body=texts.EmbedBody, form=embeddings_form,
    ),
    Route(
        path="/tokenize", handler=text_routes.tokenize, summary="Tokens of a text or a chat.",
        method="POST", body=texts.TokenizeBody,
    ),
    Route(
        path="/detokenize", handler=text_routes.detokenize, summary="The text of tokens.",
        method="POST", body=texts.DetokenizeBody, form=detokenize_form,
    ),
)  # fmt: skip
