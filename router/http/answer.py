"""One generation as an HTTP response: whole, or as server-sent events; a client that goes cancels it.

The status is sent with the first token, not before: what is refused or shed until then has its own status.
What does not live here: what events look like in an API (one module for each).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.api import Admitted, StreamEvent
from pdserve.errors import PdserveError
from router.http.errors import ErrorForm, error_response, internal_error
from router.http.generation import Numbered
from router.http.strict_json import dump

log = logging.getLogger(__name__)

_MARK = "\x00 text \x00"


class Reply(Protocol):
    """Turns events into what one API sends. Used by one response.

    streams: server-sent events, or one JSON body. feed: bytes to send now, maybe none; never for a whole
    body. finish: the rest, after the last event. failed: what tells an error once a stream has begun.
    """

    @property
    def streams(self) -> bool: ...

    def feed(self, prompt: int, event: StreamEvent) -> bytes: ...

    def finish(self) -> bytes: ...

    def failed(self, error: PdserveError) -> bytes: ...


class Answer(Response):
    """The response of a route that generates."""

    def __init__(self, events: AsyncGenerator[Numbered, None], reply: Reply, form: ErrorForm) -> None:
        super().__init__()
        self._events, self._reply, self._form = events, reply, form
        self._request_id = ""
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_there(self._run(scope, receive, send), receive)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                await self._send_all(events, send)
        except PdserveError as error:
            await self._tell(error, scope, receive, send)
        except Exception:
            log.exception("an HTTP request failed")
            await self._tell(internal_error(), scope, receive, send)

    async def _send_all(self, events: AsyncGenerator[Numbered, None], send: Send) -> None:
        reply = self._reply
        async for prompt, event in events:
            if isinstance(event, Admitted):
                self._request_id = self._request_id or event.request_id
                reply.feed(prompt, event)
                continue
            data = reply.feed(prompt, event)
            if reply.streams and not self._begun:
                await self._begin(send)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        rest = reply.finish()
        if not self._begun:
            await self._begin(send, None if reply.streams else len(rest))
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _begin(self, send: Send, length: int | None = None) -> None:
        self._begun = True
        media = b"text/event-stream; charset=utf-8" if self._reply.streams else b"application/json"
        headers = [(b"content-type", media), (b"x-request-id", self._request_id.encode())]
        if self._reply.streams:
            headers.append((b"cache-control", b"no-cache"))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _tell(self, error: PdserveError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begun:
            data = self._reply.failed(error)
            await send({"type": "http.response.body", "body": data, "more_body": False})
            return
        response = error_response(error, self._form)
        if self._request_id:
            response.headers["x-request-id"] = self._request_id
        await response(scope, receive, send)


async def while_there(response: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs a response to its end, or until the client has hung up: then it is cancelled."""
    work = asyncio.ensure_future(response)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(value: object) -> bytes:
    """One server-sent event of OpenAI's kind."""
    return b"data: " + dump(value) + b"\n\n"


class PlainText:
    """Events that differ only in one text: what stands around it is written once. Most tokens are such."""

    def __init__(self, around: Callable[[str], bytes]) -> None:
        """around: the whole event with a text."""
        self._before, self._after = around(_MARK).split(dump(_MARK), 1)

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + dump(text) + self._after
