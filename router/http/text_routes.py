"""/tokenize and /detokenize in vLLM's form, /v1/embeddings in OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import Cancelled, InvalidRequest
from router import texts
from router.http.body import read
from router.http.gateway import Gateway
from router.http.route import json_response
from router.http.schema.texts import DetokenizeBody, EmbedBody, TokenizeBody

T = TypeVar("T")


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """Ids of a prompt or a chat, as a request would have them."""
    gateway.caller(request)
    body = await read(request, TokenizeBody)
    gateway.name(body.model)
    made = await texts.tokenize(gateway.hub, body.input())
    spelled = [token.decode("utf-8", "replace") for token in made.tokens] if body.return_token_strs else None
    told = {"count": len(made.ids), "max_model_len": gateway.info().limits.max_context}
    return json_response({**told, "tokens": made.ids, "token_strs": spelled})


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """The text of ids."""
    gateway.caller(request)
    body = await read(request, DetokenizeBody)
    gateway.name(body.model)
    return json_response({"prompt": await texts.detokenize(gateway.hub, tuple(body.tokens))})


async def embed(gateway: Gateway, request: Request) -> Response:
    """A vector of length 1 for each input: the mean of its tokens' last hidden states."""
    caller = gateway.caller(request)
    body = await read(request, EmbedBody)
    name = gateway.name(body.model)
    made = await unless_gone(request, texts.embed(gateway.hub, body.inputs(), caller=caller))
    size = len(made.vectors[0])
    if body.dimensions not in (None, size):
        raise InvalidRequest.field("dimensions", f"can only be the model's own, {size}.")
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector}
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.usage.prompt_tokens, "total_tokens": made.usage.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; ends it when the client hangs up. The body has been read. Raises Cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("The client has gone.")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _base64(vector: tuple[float, ...]) -> str:
    """Little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
